"""Settings every test shares: how long Hypothesis looks for a counterexample."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from native import load_extension

settings.register_profile(
    "default", max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # for tests/mutants: whether a bug is found, not how small it gets
    "mutants",
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
load_extension()
settings.load_profile(os.environ.get("OCTAVO_HYPOTHESIS", "default"))
