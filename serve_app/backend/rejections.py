"""What a replica answers for a request that its model can't take: which field is at fault, and what to change."""

from __future__ import annotations

from serve_app.backend.dialect import BadTool
from serve_app.backend.messages import GenerateCall, Rejected, Rejection
from serve_app.engine.errors import UnsupportedGrammar


def refused_prompt(error: ValueError, call: GenerateCall) -> Rejected:
    """The rejection of a call whose prompt can't be made."""
    if isinstance(error, BadTool):
        return _of_tool(error.name, str(error), call)
    return Rejected(Rejection.INVALID, message=str(error))


def refused_sampling(error: ValueError, call: GenerateCall) -> Rejected | None:
    """The rejection of a call that the engine can't hold to what it asks; None where the replica is at fault."""
    if isinstance(error, UnsupportedGrammar):
        if error.alternative is not None:
            named = call.function or call.tools[error.alternative]["function"]["name"]
            return _of_tool(named, str(error), call)
        param = "tools" if call.tool_choice == "required" else "response_format"
        return Rejected(Rejection.INVALID, message=f"{param}: {error}.", param=param)
    if str(error).startswith("logit_bias"):  # the sampler names the parameter
        message = "logit_bias has token ids outside this model's vocabulary: leave them out."
        return Rejected(Rejection.INVALID, message=message, param="logit_bias")
    return None


def _of_tool(name: str, why: str, call: GenerateCall) -> Rejected:
    at = next(at for at, tool in enumerate(call.tools) if tool["function"]["name"] == name)
    param = f"tools[{at}].function.parameters"
    return Rejected(Rejection.INVALID, message=f"{param}: {why}.", param=param)
