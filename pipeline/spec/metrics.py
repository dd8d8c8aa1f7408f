"""The task metrics of a spec as pydantic reads them; they are declared in `validation/metrics/tasks/terms.py`."""

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

from pydantic import Discriminator, GetJsonSchemaHandler, Tag, WrapValidator

from enginesmith.core.text import suggest
from enginesmith.core.types import PRECISIONS
from pipeline.spec.source import Mistakes
from validation.metrics.tasks.terms import METRICS, TaskMetric

_DEFAULT = "accuracy"
_SEVERAL, _ONE = "[several]", "[one]"


class _Schema:
    """The JSON schema of a metric: only the default one goes without its name, and `decides` may be true or false."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        keys = definition["properties"]
        if keys["name"].get("default", _DEFAULT) != _DEFAULT:
            del keys["name"]["default"]
            definition["required"] = ["name", *definition["required"]]
        array_schema = {"type": "array", "items": {"enum": list(PRECISIONS), "type": "string"}}
        metadata = {key: keys["decides"][key] for key in ("default", "description", "title")}
        keys["decides"] = {"anyOf": [{"type": "boolean"}, array_schema], **metadata}
        return reference


def _name_of(value: object) -> str:
    """The tag of a metric: its name, `accuracy` where it gives none."""
    return f"[{value.get('name', _DEFAULT) if isinstance(value, dict) else getattr(value, 'name', _DEFAULT)}]"


def _read(value: object, handler: Any) -> TaskMetric:
    """The metric that a spec asks for. Raises Mistakes for what does not fit together."""
    if not isinstance(value, dict):
        metric: TaskMetric = handler(value)
        return metric
    if (name := value.get("name", _DEFAULT)) not in METRICS:
        raise Mistakes([(("name",), f"metric {name!r} is not known; {suggest(str(name), METRICS)}")])
    if isinstance(decides := value.get("decides"), bool):
        value = {**value, "decides": [precision for precision in PRECISIONS if decides and precision != "fp32"]}
    metric = handler(value)
    if not value.keys() & metric.limit_keys():
        keys_text = ", ".join(f"{key}: VALUE" for key in metric.limit_keys())
        raise ValueError(f"asks for nothing; give {keys_text}, or floor: null to have it measured and not judged")
    if mistakes := [((key,), text) for key, text in metric.mistakes()]:
        raise Mistakes(mistakes)
    return metric


if TYPE_CHECKING:
    Metrics: TypeAlias = TaskMetric | tuple[TaskMetric, ...]
else:
    _Metric = Annotated[
        Union[tuple(Annotated[kind, _Schema(), Tag(f"[{name}]")] for name, kind in METRICS.items())],  # noqa: UP007
        Discriminator(_name_of),
        WrapValidator(_read),
    ]
    # One metric, or a list of them.
    Metrics = Annotated[
        Annotated[_Metric, Tag(_ONE)] | Annotated[tuple[_Metric, ...], Tag(_SEVERAL)],
        Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
    ]
