"""The part of burst that travels: everything a training machine needs, and nothing of the launcher.

Modules in two kinds. Without torch, also used by the launcher, so that what was checked is what is trained:
``records``, ``manifest``, ``config``, ``rows``, ``chat``, ``tokens``, ``tiny``, ``seal``. With torch, on the training
machine only: ``precision``, ``model``, ``audits``, ``trainer``, ``artifacts``, ``probes``.
"""

PAYLOAD_VERSION = "1"
