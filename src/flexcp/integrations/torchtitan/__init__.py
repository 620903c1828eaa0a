"""torchtitan's context parallelism on flexcp's plans: `enable`, then its trainer as it is."""

from flexcp.integrations.torchtitan.enabled import Enabled, enable

__all__ = ["Enabled", "enable"]
