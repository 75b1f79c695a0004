"""Messages to token ids, exactly as the model's own server makes them, and ids back to text.

Nothing here imports transformers or tokenizers before it is needed.
"""

from shardmill.rendering.decode import Decoder
from shardmill.rendering.embedded import EMBEDDED_TOKENIZER_SHA256, embedded_gguf
from shardmill.rendering.files import find_tokenizer, tokenizer_digest, tokenizer_folder
from shardmill.rendering.render import ChatMessage, Rendered, Renderer, RenderError

__all__ = [
    "EMBEDDED_TOKENIZER_SHA256",
    "ChatMessage",
    "Decoder",
    "RenderError",
    "Rendered",
    "Renderer",
    "embedded_gguf",
    "find_tokenizer",
    "tokenizer_digest",
    "tokenizer_folder",
]
