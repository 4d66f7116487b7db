"""The base class of config sections, and the field types that several sections share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

RUN_ID_PATTERN = r"^[a-z][a-z0-9-]{0,38}[a-z0-9]$"

MAX_COUNT = 2**31 - 1
"""Largest count: products of several counts still fit into 64 bits."""
PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
PATH_PATTERN = r"^[^\x00]*$"
# A plugin. Names of entry points have no colon; `config-schema` adds the installed ones.
ClassName = Annotated[Text, Field(json_schema_extra={"pattern": r"^[^:]+:[^:]+$"})]

PLUGIN_TAG = "plugin"


def _as_list(value: Any) -> Any:
    """A single name may be written without the brackets of a list."""
    if isinstance(value, str):
        return [value]
    return value


Names = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


def kind_tag(*kinds: str) -> Callable[[Any], str]:
    """For the union of a section's kinds: the tag of a section, by its name. All other names are plugins."""

    def tag(section: Any) -> str:
        if isinstance(section, dict):
            name = section.get("name", kinds[0])
        else:  # an instance of the class
            name = getattr(section, "name", None)
        if name in kinds:
            return str(name)
        return PLUGIN_TAG

    return tag


def _number_or_all(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:  # one error per member of the union
        raise PydanticCustomError("number_or_all", "must be an integer >= 2, or `all`") from None


TwoOrMoreOrAll = Annotated[Annotated[int, Field(ge=2, le=MAX_COUNT)] | Literal["all"], WrapValidator(_number_or_all)]


@dataclass(frozen=True)
class ResumeMarker:
    """Metadata of a field that does not decide the result: a resumed run may have another value."""


T = TypeVar("T")
MayChange = Annotated[T, ResumeMarker()]
"""`MayChange[X]`: a field of type X that may differ between a run and its resumption. Any other field must be equal,
unless --allow-config-change is given."""


@dataclass(frozen=True)
class DefaultMarker:
    """Metadata of a field that may be null, which means its default."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


OrDefault = Annotated[T, DefaultMarker()]
"""`OrDefault[X]`: a field of type X whose default depends on other fields; null means that default."""

# (fields concerned, what is wrong and the remedy)
Problem = tuple[tuple[str, ...], str]


class Section(BaseModel):
    # Validators are built on use, and the docstrings under the fields are read by reference.py: both are slow, and most
    # commands need few of them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    def problems(self) -> Iterator[Problem]:
        """Problems that concern several fields; a field's own are found by its type."""
        yield from ()
