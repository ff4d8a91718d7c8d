"""Lightning and Fabric with a zeroweave engine. Importing this registers strategies by name, in both:

    import zeroweave.integrations.lightning

    Fabric(strategy="zeroweave_stage3")        Trainer(strategy="zeroweave_stage3")

`ZeroweaveFabricStrategy` and `ZeroweaveStrategy` take a whole config; see docs/lightning.md.
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zeroweave.integrations.lightning_fabric import ZeroweaveFabricStrategy
from zeroweave.integrations.lightning_trainer import ZeroweaveStrategy

__all__ = ["ZeroweaveFabricStrategy", "ZeroweaveStrategy"]

for _stage in (1, 2, 3):
    _name, _what = f"zeroweave_stage{_stage}", f"ZeRO stage {_stage} by zeroweave"
    STRATEGY_REGISTRY.register(_name, ZeroweaveFabricStrategy, _what, override=True, config={"stage": _stage})
    StrategyRegistry.register(_name, ZeroweaveStrategy, _what, override=True, config={"stage": _stage})
