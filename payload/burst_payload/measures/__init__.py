"""What makes training smaller or faster without changing what is computed: one module for each measure.

``table`` is the list of them, with what each needs, and decides which ones a run takes; it imports no torch, so a plan
reads it too. Each of the others has ``apply(subject) -> Patches``: it changes a model or a trainer in place, and
``Patches.undo`` puts everything back. ``apply`` is the seam to a run.
"""
