"""POST /v1/embeddings, and vLLM's /classify, /score and /rerank"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lora_serve.server.schemas.markers import Refused
from lora_serve.server.schemas.request import RequestFields
from lora_serve.server.schemas.unserved import NO_TEMPLATE

MAX_INT = 2**31 - 1


_NO_TEXT = "the answer is numbers, which no schema or grammar holds: leave it out"


class PoolingFields(RequestFields):
    """The fields of all pooling requests. Inputs are checked by hand, as a union's errors are unreadable."""

    response_format: Annotated[Any, Refused(_NO_TEXT, ({"type": "text"},))] = None
    structured_outputs: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_json: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_regex: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_choice: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_grammar: Annotated[Any, Refused(_NO_TEXT)] = None
    structural_tag: Annotated[Any, Refused(_NO_TEXT)] = None
    chat_template: Annotated[Any, Refused(NO_TEMPLATE, ("",))] = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT)  # -1: to the model's limit


class InputFields(PoolingFields):
    input: Any  # str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True


class EmbeddingFields(InputFields):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, le=MAX_INT
    )  # the number of leading dimensions to keep, made unit length again


class ClassifyFields(InputFields):
    pass


class ScoreFields(PoolingFields):
    text_1: Any  # str | list[str]
    text_2: Any


class RerankFields(PoolingFields):
    query: str
    documents: Any  # list of str | {"text": str}
    top_n: int = Field(0, ge=0, le=MAX_INT)  # 0: all of them
    return_documents: bool = True
