"""What every section of the config is made of."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

RUN_ID_PATTERN = r"^[a-z][a-z0-9-]{0,38}[a-z0-9]$"

MOST = 2**31 - 1
"""The largest count: what is computed from several of them still fits into 64 bits."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]

# One name may be written without the brackets of a list.
Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def _number_or_all(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:  # one for each of the two
        raise PydanticCustomError("number_or_all", "must be a number, 2 or more, or `all`") from None


TwoOrMoreOrAll = Annotated[Annotated[int, Field(ge=2, le=MOST)] | Literal["all"], WrapValidator(_number_or_all)]

# (fields concerned, what is wrong and the remedy)
Problem = tuple[tuple[str, ...], str]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the section although every field by itself is right."""
        yield from ()
