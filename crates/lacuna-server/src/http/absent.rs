//! Paths that other servers answer and this one does not: what is missing is said, so that nobody
//! looks for a mistake in the address.

/// Paths and what they are for.
const ABSENT: [(&str, &str); 22] = [
    ("/api/copy", "keep models; it has what it was started with"),
    (
        "/api/create",
        "make models; it has what it was started with",
    ),
    (
        "/api/delete",
        "keep models; it has what it was started with",
    ),
    ("/api/embed", "compute embeddings"),
    ("/api/embeddings", "compute embeddings"),
    ("/api/pull", "fetch models; it has what it was started with"),
    ("/api/push", "send models"),
    ("/classify", "classify texts"),
    ("/embed", "compute embeddings"),
    (
        "/generate",
        "take requests of SGLang's own form; send /v1/completions",
    ),
    (
        "/inference/v1/generate",
        "take requests of vLLM's own form; send /v1/completions",
    ),
    ("/pooling", "compute embeddings"),
    ("/rerank", "rank texts"),
    ("/score", "score pairs of texts"),
    ("/v1/audio/speech", "make sound"),
    ("/v1/audio/transcriptions", "read sound"),
    ("/v1/audio/translations", "read sound"),
    ("/v1/embeddings", "compute embeddings"),
    ("/v1/images/generations", "make pictures"),
    ("/v1/moderations", "judge texts"),
    ("/v1/rerank", "rank texts"),
    ("/v1/score", "score pairs of texts"),
];

/// What a server that answers `path` does, if any is known to.
pub(crate) fn purpose(path: &str) -> Option<&'static str> {
    let found = ABSENT.iter().find(|(absent, _)| *absent == path);
    found.map(|&(_, purpose)| purpose)
}
