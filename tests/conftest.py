# SPDX-License-Identifier: Apache-2.0
"""What every test shares: Hypothesis without time limits, since no test asserts timings."""

from hypothesis import settings

settings.register_profile("project", deadline=None)
settings.load_profile("project")
