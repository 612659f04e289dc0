"""What all tests share."""

import os

from hypothesis import settings

# The same examples every time: a submission is not refused for a case that its change has nothing to do with.
# HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
