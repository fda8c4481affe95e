"""What tests of Triton kernels change in its interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton_tools


def patch_attr(obj: Any, name: Any, member: Any, builder: Any, scope: Any) -> None: ...


@pytest.mark.parametrize("there", [True, False])
def test_an_interpreter_of_another_signature_keeps_its_own(there: bool) -> None:
    def same(pkg: Any, builder: Any, scope: Any) -> None: ...

    def other(pkg: Any, builder: Any) -> None: ...

    for theirs, replaced in ((same, there), (other, False)):
        interpreter = SimpleNamespace(_patch_builtin=theirs, **({"_patch_attr": patch_attr} if there else {}))
        triton_tools.make_quick(interpreter)
        assert (interpreter._patch_builtin is not theirs) is replaced
