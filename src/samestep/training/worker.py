"""One rank as a process of its own: `python -m samestep.training.worker REQUEST`. Started by `launch`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from samestep import world
from samestep.errors import SamestepError
from samestep.recipe.schema import Recipe


def main(order: Path) -> int:
    """Runs the rank; a failure is left beside the request as one message for the launcher."""
    warnings.filterwarnings("ignore")
    content = json.loads(order.read_text(encoding="utf-8"))
    try:
        from samestep.training.rank import Request, run

        recipe = Recipe.model_validate(content["recipe"])
        run(Request(recipe=recipe, out=Path(content["out"]), keep_masters=content["keep_masters"]))
    except SamestepError as error:
        return _fail(order, str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return _fail(order, f"unexpected {type(error).__name__} at {place}: {first_line}", 1)
    finally:
        world.stop()
    return 0


def _fail(order: Path, message: str, exit_code: int) -> int:
    report = order.with_name(f"error-{world.launched_rank()}.json")
    report.write_text(json.dumps({"message": message, "exit_code": exit_code}), encoding="utf-8")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
