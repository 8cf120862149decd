"""Entry point, with the classes that this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_envs.reasoning_gym import ReasoningGymEnvironment
from rlplug_envs.verifiers_environment import VerifiersEnvironment

# the command line knows the short name of a prompt source once its class is imported
from rlplug_envs.verifiers_source import VerifiersSource as VerifiersSource

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_environments(registry: Registry) -> None:
    for environment in (ReasoningGymEnvironment, VerifiersEnvironment):
        registry.add("environments", environment)
