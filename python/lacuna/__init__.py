"""Large language models where memory is scarce.

    import lacuna

    with lacuna.Engine("demo", budget="256MiB") as engine:
        for output in engine.generate(["What is ownership?", "What is a trait?"], max_tokens=32):
            print(output.text)
"""

from lacuna import errors
from lacuna._native import __version__
from lacuna.embedder import Embedder, Reranker
from lacuna.engine import Engine, Tokenizer
from lacuna.errors import (
    BudgetExceeded,
    Busy,
    Closed,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    Forked,
    InUse,
    InvalidRequest,
    LacunaError,
    ModelError,
)
from lacuna.output import Choice, Logprob, Output, Piece, TokenLogprob, Usage
from lacuna.program import plan, program
from lacuna.sampling import SamplingParams
from lacuna.server import Server, serve
from lacuna.session import Session

__all__ = [
    "BudgetExceeded",
    "Busy",
    "Choice",
    "Closed",
    "ContextTooLong",
    "DeadlineExceeded",
    "Embedder",
    "Engine",
    "EngineFailed",
    "Forked",
    "InUse",
    "InvalidRequest",
    "LacunaError",
    "Logprob",
    "ModelError",
    "Output",
    "Piece",
    "Reranker",
    "SamplingParams",
    "Server",
    "Session",
    "TokenLogprob",
    "Tokenizer",
    "Usage",
    "__version__",
    "errors",
    "plan",
    "program",
    "serve",
]
