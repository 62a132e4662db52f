"""POST /v1/embeddings, and vLLM's /classify, /score and /rerank"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lora_serve.server.schemas.fields import MAX_SALT_LENGTH, Ignored, ObjectsOrNull, Refused, TemplateValues
from lora_serve.server.schemas.inference import NO_MEDIA, UnservedInputFields

MAX_INT = 2**31 - 1
_NO_TEXT = "the answer is numbers, which no schema or grammar holds: leave it out"
_NO_SCORE_TEMPLATE = "pairs are read without a template: write it into the query"


class PoolingFields(UnservedInputFields):
    """The fields of all pooling requests. Inputs are checked by hand, as a union's errors are unreadable."""

    response_format: Annotated[Any, Refused(_NO_TEXT, ({"type": "text"},))] = None
    structured_outputs: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_json: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_regex: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_choice: Annotated[Any, Refused(_NO_TEXT)] = None
    guided_grammar: Annotated[Any, Refused(_NO_TEXT)] = None
    structural_tag: Annotated[Any, Refused(_NO_TEXT)] = None
    padding: Annotated[Any, Refused("no text is padded with tokens that are read: leave it out", ("do_not_pad",))] = (
        None
    )
    normalize: Annotated[Any, Refused("is vLLM's older name: send `use_activation`")] = None
    cache_salt: Annotated[str | None, Ignored("nothing of these requests is kept that another could find")] = Field(
        None, min_length=1, max_length=MAX_SALT_LENGTH
    )
    use_activation: bool | None = None  # None: as the model says
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT)  # -1: to the model's limit
    truncation_side: Literal["left", "right"] | None = None  # that loses tokens; None: the tokenizer's


class InputFields(PoolingFields):
    """Texts, or chats."""

    input: Any = None  # str | list[str] | list[int] | list[list[int]], or as `messages`
    messages: ObjectsOrNull = None  # or a list of such lists; checked by text/chat.py
    add_special_tokens: bool | None = None  # None: to texts, and not to chats
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: TemplateValues = {}
    media_io_kwargs: Annotated[Any, Ignored(NO_MEDIA)] = None

    @property
    def template_values(self) -> dict[str, Any]:
        """The values that the chat template is given."""
        return self.chat_template_kwargs


class EmbeddingFields(InputFields):
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # in base64
    endianness: Literal["native", "big", "little"] = "native"  # in base64
    dimensions: int | None = Field(None, ge=1, le=MAX_INT)  # the number of leading dimensions to keep


class ClassifyFields(InputFields):
    pass


class ComparingFields(PoolingFields):
    """The fields of all requests that compare two texts."""

    max_tokens_per_query: int = Field(0, ge=0, le=MAX_INT)  # 0: all of them
    max_tokens_per_doc: int = Field(0, ge=0, le=MAX_INT)
    instruction: Annotated[Any, Refused(_NO_SCORE_TEMPLATE, ("",))] = None
    chat_template_kwargs: Annotated[Any, Refused(_NO_SCORE_TEMPLATE, ({},))] = None


class ScoreFields(ComparingFields):
    text_1: Any = None  # str | list[str], as all of them
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None


class RerankFields(ComparingFields):
    query: str
    documents: Any  # list of str | {"text": str}
    top_n: int = Field(0, ge=0, le=MAX_INT)  # 0: all of them
    return_documents: bool = True
