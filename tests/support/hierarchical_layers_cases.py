# SPDX-License-Identifier: Apache-2.0
"""Classic layers over two hops, and over one."""

import io
from contextlib import redirect_stdout

from deepspeed.moe.sharded_moe import MOELayer

from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from tests.support.models import Layout, make_engine, parameters, train_steps

TWO_HOPS = {"enabled": True, "transport": "hierarchical", "node_size": 2}
FLAT = {"enabled": True, "transport": "collective"}


def sent(transport) -> int:
    return transport.hops.between.sent_bytes if isinstance(transport, Hierarchical) else 0


def classic(section: dict | None, layout: Layout) -> tuple:
    """Losses and parameters after training, bytes that crossed, and the lines about transports."""
    with redirect_stdout(io.StringIO()) as out:
        engine = make_engine(layout, section)
    losses = [record["loss"] for record in train_steps(engine, layout)]
    inner = [module for module in engine.module.modules() if isinstance(module, MOELayer)]
    crossed = [sent(layer.mxfp8_settings.choose_transport(layer.ep_group)) for layer in inner if section]
    said = [line for line in out.getvalue().splitlines() if "transport" in line]
    return losses, parameters(engine), crossed, said
