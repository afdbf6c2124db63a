//! What every request passes on its way in and every reply on its way out: a name for both, what web pages of other
//! sites are told, and a line in the access log.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::config::ServerConfig;
use crate::date;
use crate::http::account::Account;
use crate::http::log::AccessLog;
use crate::keys::ApiKeys;

/// What a client calls a request, or is told that it is called.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Characters of a name that a client may give.
const MOST_ID: usize = 128;
/// What scripts of other sites may read of a reply beside its body.
const EXPOSED: HeaderValue =
    HeaderValue::from_static("x-request-id, x-lacuna-ignored, retry-after");
/// For how long browsers need not ask again what they may send, in seconds.
const PREFLIGHT_SECONDS: HeaderValue = HeaderValue::from_static("600");

/// Who is let in, and what is kept of it.
#[derive(Debug, Clone)]
pub(crate) struct Doors {
    pub(crate) keys: ApiKeys,
    origins: Arc<[String]>,
    log: Option<AccessLog>,
}

/// A web site whose pages may use the server, as browsers name it: `https://chat.example`, without a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(String);

/// What is no [`Origin`].
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "`{0}` is not an origin: give a scheme, a host and its port if it has one, such as https://chat.example"
)]
pub struct NoOrigin(String);

impl std::str::FromStr for Origin {
    type Err = NoOrigin;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let no = || NoOrigin(text.to_owned());
        let host = text
            .strip_prefix("http://")
            .or(text.strip_prefix("https://"))
            .ok_or_else(no)?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]_".contains(&byte);
        match !host.is_empty() && host.bytes().all(fits) {
            true => Ok(Self(text.to_ascii_lowercase())),
            false => Err(no()),
        }
    }
}

/// A request as the log has it.
#[derive(Debug, Serialize)]
struct Entry {
    /// When it came.
    time: String,
    id: String,
    method: String,
    /// Without what follows a question mark.
    path: String,
    status: u16,
    /// Until the reply's head was there.
    head_seconds: f64,
    /// Until its last byte was handed over.
    seconds: f64,
    bytes: u64,
    /// Whether all of the reply was handed over: the client may have gone before.
    whole: bool,
    /// What it came to, if a model answered.
    #[serde(flatten)]
    account: Option<Account>,
}

impl Doors {
    pub(crate) fn of(config: &ServerConfig) -> Self {
        let origins = config.cors_origins.iter();
        Self {
            keys: config.keys.clone(),
            origins: origins.map(|Origin(origin)| origin.clone()).collect(),
            log: config.access_log.clone(),
        }
    }

    /// Whether pages of `origin` may use the server.
    pub(crate) fn admits(&self, origin: &str) -> bool {
        let mut origins = self.origins.iter();
        origins.any(|admitted| admitted.eq_ignore_ascii_case(origin))
    }

    /// The origin of a request that comes from a page of another site that is let in.
    fn admitted(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let admitted = origin.to_str().is_ok_and(|origin| self.admits(origin));
        admitted.then(|| origin.clone())
    }
}

/// Passes a request through, and its reply out.
pub(crate) async fn pass(State(doors): State<Doors>, request: Request, next: Next) -> Response {
    let came = Instant::now();
    let id = request_id(request.headers());
    let origin = doors.admitted(request.headers());
    let entry = doors.log.is_some().then(|| Entry {
        time: date::now(),
        id: id.clone(),
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        status: 0,
        head_seconds: 0.0,
        seconds: 0.0,
        bytes: 0,
        whole: false,
        account: None,
    });
    let mut response = match origin.is_some().then(|| preflight(&request)).flatten() {
        Some(response) => response,
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    if !doors.origins.is_empty() {
        // What is kept between may not give one site what was meant for another.
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    let (Some(log), Some(mut entry)) = (doors.log, entry) else {
        return response;
    };
    entry.status = response.status().as_u16();
    entry.head_seconds = came.elapsed().as_secs_f64();
    entry.account = response.extensions().get().cloned();
    response.map(|body| {
        Body::new(Logged {
            body,
            log,
            came,
            entry,
        })
    })
}

/// The answer to a browser that asks what a page may send, before the page sends it. It has no key yet.
fn preflight(request: &Request) -> Option<Response> {
    let headers = request.headers();
    let asked = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD);
    if request.method() != Method::OPTIONS || asked.is_none() {
        return None;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    let answers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, DELETE");
    answers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    answers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECONDS);
    // Clients have headers of their own, of which none does harm.
    if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    Some(response)
}

/// The client's name for a request, if it is one that can go into a log and a header, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(&byte);
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let given = given.filter(|id| !id.is_empty() && id.len() <= MOST_ID && id.bytes().all(fits));
    given.map_or_else(new_id, str::to_owned)
}

/// A name that no other request of any server has, but for one in 2^64.
fn new_id() -> String {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("req-{:016x}", KEY.hash_one(number))
}

/// A body whose end goes to the log.
struct Logged {
    body: Body,
    log: AccessLog,
    came: Instant,
    entry: Entry,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                self.entry.bytes += bytes as u64;
            }
            Poll::Ready(None) => self.entry.whole = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        // A body whose length is known is not asked whether there is more.
        self.entry.whole |= self.body.is_end_stream();
        self.entry.seconds = self.came.elapsed().as_secs_f64();
        if let Ok(line) = serde_json::to_string(&self.entry) {
            self.log.write(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_a_scheme_and_a_host_and_nothing_else() {
        for origin in [
            "https://chat.example",
            "http://localhost:3000",
            "http://[::1]:80",
        ] {
            assert!(origin.parse::<Origin>().is_ok(), "{origin}");
        }
        for other in [
            "*",
            "null",
            "chat.example",
            "https://",
            "https://a.example/path",
            "ftp://a",
        ] {
            assert!(other.parse::<Origin>().is_err(), "{other}");
        }
    }

    #[test]
    fn a_request_keeps_its_name_if_that_can_go_into_a_log() {
        let named = |name: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_str(name).expect("a header"));
            request_id(&headers)
        };
        assert_eq!(named("7f3a-b_c.d:1"), "7f3a-b_c.d:1");
        let long = "a".repeat(MOST_ID + 1);
        for other in ["", "two words", "\"quoted\"", long.as_str()] {
            let id = named(other);
            assert_ne!(id, other);
            assert_ne!(id, named(other), "each has a name of its own");
        }
    }
}
