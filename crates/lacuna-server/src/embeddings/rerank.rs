//! `POST /v1/rerank`, as Jina and Cohere have it: documents by how well they answer a query.

use std::io::Write;

use lacuna_engine::{Excess, Pair, Reranker};
use lacuna_text::tokenizer::EncodeLimits;
use serde::Deserialize;
use serde_json::{Value, json};

use super::request::{MOST_TEXTS, place_in};
use super::{Embeddings, TURN, Wanted, Work, refused};
use crate::http::error::ApiError;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    query: String,
    documents: Vec<Document>,
    #[serde(default)]
    pub(super) model: Option<String>,
    /// Results at most.
    #[serde(default)]
    top_n: Option<usize>,
    #[serde(default)]
    return_documents: Option<bool>,
    /// Whether longer documents are cut instead of refused.
    #[serde(default)]
    truncate: Option<bool>,
    /// Who asks, as for embeddings.
    #[serde(default, rename = "user")]
    _user: Value,
}

/// A document as it is sent.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, or an object with a `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Object { text } => text,
        }
    }
}

impl Request {
    fn check(&self) -> Result<(), ApiError> {
        let count = self.documents.len();
        if count == 0 || count > MOST_TEXTS {
            return Err(ApiError::field(
                "documents",
                format!("{count} documents, expected 1 to {MOST_TEXTS}"),
            ));
        }
        if self.query.is_empty() {
            return Err(ApiError::field("query", "`query` is empty"));
        }
        if self.top_n == Some(0) {
            return Err(ApiError::field("top_n", "`top_n` is 0, expected 1 or more"));
        }
        let empty = self.documents.iter().position(|it| it.text().is_empty());
        match empty.map(|index| place_in("documents", index)) {
            Some(place) => {
                let message = format!("`{place}` is empty");
                Err(ApiError::field(place, message))
            }
            None => Ok(()),
        }
    }

    fn excess(&self) -> Excess {
        match self.truncate {
            Some(true) => Excess::Cut,
            Some(false) | None => Excess::Refuse,
        }
    }

    /// Bytes that the reply takes at most.
    pub(super) fn most_bytes(&self) -> usize {
        /// Names of fields, index and score, and a share of what begins and ends the reply.
        const AROUND: usize = 256;
        /// A control character in JSON.
        const BYTES_OF_ESCAPED: usize = 6;
        let documents = self.documents.iter();
        let text = |document: &Document| match self.return_documents {
            Some(true) => BYTES_OF_ESCAPED.saturating_mul(document.text().len()),
            Some(false) | None => 0,
        };
        let bytes = documents.map(|document| AROUND.saturating_add(text(document)));
        bytes.fold(AROUND, usize::saturating_add)
    }
}

/// Writes the reply to a request whose model was checked, and returns how many tokens were computed.
pub(super) fn write(
    app: &Embeddings,
    reply: &mut Vec<u8>,
    request: &Request,
    limits: &EncodeLimits,
    wanted: &Wanted,
) -> Result<usize, ApiError> {
    request.check()?;
    let mut scores = Vec::with_capacity(request.documents.len());
    let mut tokens = 0;
    for documents in request.documents.chunks(TURN) {
        app.check(wanted)?;
        // The query's tokens are in each, so no more are held than of a turn.
        let pairs = pairs(app, request, documents, scores.len(), limits)?;
        tokens += pairs.iter().map(|pair| pair.tokens.len()).sum::<usize>();
        app.working(|work| match work {
            Work::Score(reranker) => score(reranker, &pairs, &mut scores),
            Work::Embed(_) => Err(no_scores()),
        })?;
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    // Equal scores keep the order in which documents were sent.
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(request.top_n.unwrap_or(usize::MAX));
    let written = write_results(app, reply, request, (&order, &scores), tokens);
    written.map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(tokens)
}

fn pairs(
    app: &Embeddings,
    request: &Request,
    documents: &[Document],
    before: usize,
    limits: &EncodeLimits,
) -> Result<Vec<Pair>, ApiError> {
    let pair =
        |document: &str| (app.encoder).pair(&request.query, document, request.excess(), limits);
    let pair = |(index, document): (usize, &Document)| {
        pair(document.text()).map_err(|error| match pair("") {
            // What has no room even for nothing is too long by itself.
            Err(_) => refused(error).of("query"),
            Ok(_) => refused(error).of(&place_in("documents", index)),
        })
    };
    (before..).zip(documents).map(pair).collect()
}

fn score(reranker: &mut Reranker, pairs: &[Pair], scores: &mut Vec<f32>) -> Result<(), ApiError> {
    let scored = reranker.score(pairs, |score| scores.push(score));
    scored.map_err(refused)
}

fn write_results(
    app: &Embeddings,
    reply: &mut Vec<u8>,
    request: &Request,
    (order, scores): (&[usize], &[f32]),
    tokens: usize,
) -> std::io::Result<()> {
    let name = Value::from(app.model_name.as_str());
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    write!(
        reply,
        "{{\"object\":\"list\",\"model\":{name},\"usage\":{usage},\"results\":["
    )?;
    for (rank, &index) in order.iter().enumerate() {
        let comma = if rank == 0 { "" } else { "," };
        let score = scores[index];
        write!(
            reply,
            "{comma}{{\"index\":{index},\"relevance_score\":{score}"
        )?;
        if request.return_documents == Some(true) {
            reply.extend_from_slice(b",\"document\":{\"text\":");
            serde_json::to_writer(&mut *reply, request.documents[index].text())?;
            reply.push(b'}');
        }
        reply.push(b'}');
    }
    reply.extend_from_slice(b"]}");
    Ok(())
}

/// What a model that makes embeddings says to documents and a query.
pub(super) fn no_scores() -> ApiError {
    ApiError::not_supported(
        "the model of this server makes embeddings of texts and scores none; send /v1/embeddings",
    )
}
