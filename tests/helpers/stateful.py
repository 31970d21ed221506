"""Settings with which hypothesis walks through the state machines of tests."""

from hypothesis import HealthCheck, Phase, settings


def walks(examples: int) -> settings:
    """Settings for `examples` walks of 15 steps, the same ones on every machine."""
    return settings(
        max_examples=examples,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
