# SPDX-License-Identifier: Apache-2.0
"""Makes the section "mxfp8_moe" of a DeepSpeed config enough, also in programs that do not import ds_mxfp8_moe.

This installs as a package of its own, `ds_mxfp8_moe_hook`. torch calls `arm` at the end of `import torch`, as an entry
point of the group "torch.backends". Nothing else is imported then. An engine whose config has the section, and does
not disable it, imports ds_mxfp8_moe and is made by it. An engine without it is made as if this hook did not exist.

The environment variable DS_MXFP8_MOE_AUTO=0 switches the hook off, and so does TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import os
import sys

ENGINE, SECTION, SWITCH = "deepspeed.runtime.engine", "mxfp8_moe", "DS_MXFP8_MOE_AUTO"


def arm() -> None:
    """Waits for DeepSpeed's engine to be imported. A second call changes nothing."""
    if os.environ.get(SWITCH) != "0" and ENGINE not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """On sys.meta_path until the engine's module is imported. Then `_watch` follows the module's own code."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != ENGINE:
            return None
        sys.meta_path.remove(_Finder)
        from importlib.util import find_spec

        spec = find_spec(name)
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            _watch(module.DeepSpeedEngine)

        spec.loader.exec_module = exec_module
        return spec


def _watch(engine_class):
    from functools import wraps

    plain = engine_class.__init__

    @wraps(plain)
    def init(self, *args, **kwargs):
        start = sys.modules.get("ds_mxfp8_moe.engine.start")
        if (start is not None and start.is_reading()) or not _is_asked_for(plain, self, args, kwargs):
            return plain(self, *args, **kwargs)
        import ds_mxfp8_moe

        ds_mxfp8_moe.enable()
        return engine_class.__init__(self, *args, **kwargs)

    engine_class.__init__ = init


def _is_asked_for(init, self, args, kwargs):
    """Whether the engine's config has the section, and does not disable it."""
    from inspect import signature

    try:
        given = signature(init).bind(self, *args, **kwargs).arguments
    except TypeError:  # DeepSpeed's own error comes next
        return False
    config = given.get("config")
    if not isinstance(config, dict) or SECTION not in config:
        return False
    section = config[SECTION]
    return not isinstance(section, dict) or section.get("enabled") is not False
