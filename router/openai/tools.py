"""The functions that a chat's model may call, and which of them it must, as a body names them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coatcheck.router.openai.sampling_fields import Body


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    neutral: ClassVar = {"strict": (False,)}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Functions are the only tools."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """By its name."""

    name: str


class NamedTool(Body):
    """tool_choice when one function must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction
