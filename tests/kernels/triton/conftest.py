"""Triton's interpreter without what it repeats: it prepares its language in every call of a helper.

Once per launch and module is enough, and takes half of the time.
"""

from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def language_prepared_once_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        prepared.clear()
        launch(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(module)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
