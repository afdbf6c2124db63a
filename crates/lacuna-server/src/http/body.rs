//! Request bodies: received within limits of size and time, and read into types that say which
//! field is wrong.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use lacuna_engine::{HeldMemory, MemoryRefusal, RequestMemory};
use lacuna_pages::ByteLength;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::RequestLimits;
use crate::http::error::ApiError;
use crate::http::extent::Extent;
use crate::http::ignored::Ignored;
use crate::http::wording::{missing, reworded};
use crate::kept::Kept;

/// A body up to this size is received whatever larger ones hold.
const SMALL_BYTES: usize = 64 << 10;

/// How much of a body that is refused is read, and for how long.
const DISCARDED_BYTES: usize = 16 << 20;
const DISCARD: Duration = Duration::from_secs(5);

/// Receives bodies into memory of the account.
#[derive(Debug, Clone)]
pub(crate) struct Bodies {
    limits: RequestLimits,
    memory: RequestMemory,
    /// Bytes of the account that larger bodies may hold while they are received: half of it, so that
    /// those which have arrived find the memory to go on and all of them are not waiting for each
    /// other.
    large: Arc<Semaphore>,
    large_bytes: usize,
    /// What is kept in the account as long as nobody needs it.
    kept: Kept,
}

/// A body, and the memory for it.
#[derive(Debug)]
pub(crate) struct Received {
    bytes: Vec<u8>,
    pub(crate) extent: Extent,
    memory: HeldMemory,
    large: Option<OwnedSemaphorePermit>,
}

/// The body of a request: on its way, or received before it was known who is to answer.
#[derive(Debug)]
pub(crate) enum Arriving {
    Body(Sent),
    Received(Received),
}

/// A body that a client sends, and what its head says of it.
#[derive(Debug)]
pub(crate) struct Sent {
    body: Body,
    /// Whether the client sends it once it is told to go on, which whoever reads it first does.
    waits: bool,
    /// How it is compressed, if it is.
    coding: Option<String>,
}

impl Arriving {
    /// The body that comes after a head with these `headers`.
    pub(crate) fn of(headers: &HeaderMap, body: Body) -> Self {
        let text = |name| headers.get(name).map(HeaderValue::as_bytes);
        let waits = text(header::EXPECT);
        let waits = waits.is_some_and(|it| it.eq_ignore_ascii_case(b"100-continue"));
        let coding = text(header::CONTENT_ENCODING).map(String::from_utf8_lossy);
        let coding = coding.filter(|it| !it.is_empty() && !it.eq_ignore_ascii_case("identity"));
        Self::Body(Sent {
            body,
            waits,
            coding: coding.map(Cow::into_owned),
        })
    }
}

/// A received body in the extensions of its request. It can be taken out once.
#[derive(Debug, Clone)]
pub(crate) struct Arrived(Arc<Mutex<Option<Received>>>);

impl Arrived {
    pub(crate) fn new(received: Received) -> Self {
        Self(Arc::new(Mutex::new(Some(received))))
    }

    fn take(&self) -> Option<Received> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<S: Sync> FromRequest<S> for Arriving {
    type Rejection = Infallible;

    async fn from_request(mut request: Request, _: &S) -> Result<Self, Infallible> {
        let arrived = request.extensions_mut().remove::<Arrived>();
        Ok(match arrived.and_then(|arrived| arrived.take()) {
            Some(received) => Self::Received(received),
            None => {
                let (parts, body) = request.into_parts();
                Self::of(&parts.headers, body)
            }
        })
    }
}

impl Bodies {
    pub(crate) fn new(limits: RequestLimits, memory: RequestMemory) -> Self {
        let large_bytes = usize::try_from(memory.limit().get() / 2).unwrap_or(usize::MAX);
        let large_bytes = large_bytes.min(Semaphore::MAX_PERMITS);
        let kept = Kept::new(memory.limit().get());
        Self {
            limits,
            memory,
            large: Arc::new(Semaphore::new(large_bytes)),
            large_bytes,
            kept,
        }
    }

    /// The whole body, which may take as long as limits say from when there is room for it. One that is refused is
    /// read to its end all the same, into nothing: who is still sending when the connection closes may never see the
    /// answer. Who waits to be told to go on is told at once instead what is wrong, if the head alone shows it.
    pub(crate) async fn receive(&self, body: Arriving) -> Result<Received, ApiError> {
        let sent = match body {
            Arriving::Received(received) => return Ok(received),
            Arriving::Body(sent) => sent,
        };
        let length = sent.body.size_hint().exact();
        let refused = self.check(length, sent.coding.as_deref());
        let mut body = sent.body.into_data_stream();
        if let Err(error) = refused {
            if !sent.waits {
                discard(&mut body).await;
            }
            return Err(error);
        }
        let mut received = match self.begin(length).await {
            Ok(received) => received,
            Err(error) => {
                discard(&mut body).await;
                return Err(error);
            }
        };
        let collected = self.collect(&mut received, &mut body);
        match tokio::time::timeout(self.limits.receive, collected).await {
            Ok(Ok(())) => Ok(received),
            Ok(Err(error)) => {
                drop(received);
                discard(&mut body).await;
                Err(error)
            }
            // Its end has been waited for.
            Err(_) => Err(ApiError::new(
                StatusCode::REQUEST_TIMEOUT,
                "timeout",
                format!("the body took longer than {:?}", self.limits.receive),
            )),
        }
    }

    /// What requests may hold together.
    pub(crate) fn memory_limit(&self) -> ByteLength {
        self.memory.limit()
    }

    /// Conversations that may be gone on with.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Takes memory if it is free, or what is kept in it gives way.
    pub(crate) fn try_take(&self, bytes: usize) -> Result<HeldMemory, ApiError> {
        loop {
            match self.memory.try_take(bytes) {
                Err(MemoryRefusal::Full { .. }) if self.kept.give_way() => {}
                taken => return Ok(taken?),
            }
        }
    }

    /// Takes what `held` lacks of `bytes` if it is free, or what is kept in it gives way. All of them are what has to fit.
    pub(crate) fn hold_in_all(&self, held: &mut HeldMemory, bytes: usize) -> Result<(), ApiError> {
        loop {
            match held.resize(bytes) {
                Err(MemoryRefusal::Full { .. }) if self.kept.give_way() => {}
                grown => return Ok(grown?),
            }
        }
    }

    /// Takes memory, waiting for it as long as a request may.
    pub(crate) async fn take(&self, bytes: usize) -> Result<HeldMemory, ApiError> {
        if let Ok(taken) = self.try_take(bytes) {
            return Ok(taken);
        }
        let taken = tokio::time::timeout(self.limits.memory_wait, self.memory.take(bytes)).await;
        Ok(taken.unwrap_or_else(|_| Err(self.memory.full(bytes)))?)
    }

    /// The same for a body that is held meanwhile: what does not fit beside it is not waited for.
    pub(crate) async fn take_beside(
        &self,
        bytes: usize,
        received: &Received,
    ) -> Result<HeldMemory, ApiError> {
        let limit = self.memory.limit();
        let needed = ByteLength::new(bytes.saturating_add(received.memory.bytes()) as u64);
        if needed > limit {
            return Err(MemoryRefusal::TooLarge { needed, limit }.into());
        }
        self.take(bytes).await
    }

    async fn room_for(&self, bytes: usize) -> Result<Received, ApiError> {
        let large = match bytes > SMALL_BYTES {
            false => None,
            true => {
                let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
                let waiting = Arc::clone(&self.large).acquire_many_owned(permits);
                let large = tokio::time::timeout(self.limits.memory_wait, waiting).await;
                // The semaphore is never closed.
                let large = large.ok().and_then(Result::ok);
                Some(large.ok_or_else(|| self.memory.full(bytes))?)
            }
        };
        let memory = self.take(bytes).await?;
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(bytes)?;
        Ok(Received {
            bytes: buffer,
            extent: Extent::default(),
            memory,
            large,
        })
    }

    /// Bytes of a body at most.
    fn limit(&self) -> usize {
        self.limits.body_bytes.min(self.large_bytes)
    }

    /// Refuses a body that is too large by what is announced, before a byte of it is held, or `coding` compressed.
    fn check(&self, length: Option<u64>, coding: Option<&str>) -> Result<(), ApiError> {
        if let Some(coding) = coding {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "compressed_body",
                format!(
                    "the body is compressed (`content-encoding: {coding}`); send it as it is, without that header"
                ),
            ));
        }
        let limit = self.limit();
        match length.is_some_and(|length| length > limit as u64) {
            true => Err(too_large(limit)),
            false => Ok(()),
        }
    }

    /// Room for a body of which `length` is announced, or for the beginning of one, waiting for it as long as a
    /// request may.
    async fn begin(&self, length: Option<u64>) -> Result<Received, ApiError> {
        let limit = self.limit();
        let first = match length {
            Some(length) => usize::try_from(length).unwrap_or(limit),
            None => SMALL_BYTES.min(limit),
        };
        let room = tokio::time::timeout(self.limits.memory_wait, self.room_for(first)).await;
        room.unwrap_or_else(|_| Err(self.memory.full(first).into()))
    }

    async fn collect(
        &self,
        received: &mut Received,
        body: &mut BodyDataStream,
    ) -> Result<(), ApiError> {
        let limit = self.limit();
        while let Some(chunk) = next(body).await {
            let chunk = chunk.map_err(|_| {
                ApiError::new(
                    StatusCode::BAD_REQUEST,
                    "incomplete_body",
                    "the connection broke off before the body's end",
                )
            })?;
            let bytes = received.bytes.len() + chunk.len();
            if bytes > limit {
                return Err(too_large(limit));
            }
            if bytes > received.bytes.capacity() {
                let capacity = bytes.max(2 * received.bytes.capacity()).min(limit);
                self.grow(received, capacity)?;
            }
            received.extent.read(&chunk);
            received.bytes.extend_from_slice(&chunk);
        }
        Ok(())
    }

    /// Room for a body whose length was not announced, which does not wait for more: it holds some.
    fn grow(&self, received: &mut Received, bytes: usize) -> Result<(), ApiError> {
        let held = received.large.as_ref().map_or(0, |it| it.num_permits());
        let permits = u32::try_from(bytes - held).unwrap_or(u32::MAX);
        let large = Arc::clone(&self.large).try_acquire_many_owned(permits);
        let large = large.map_err(|_| self.memory.full(bytes))?;
        match &mut received.large {
            Some(held) => held.merge(large),
            none => *none = Some(large),
        }
        received.memory.resize(bytes)?;
        let more = bytes - received.bytes.len();
        received.bytes.try_reserve_exact(more)?;
        Ok(())
    }
}

impl Received {
    /// The JSON object in it, for which `memory` has been taken. The body itself is given back.
    pub(crate) fn object(self) -> Result<Map<String, Value>, ApiError> {
        serde_json::from_slice(&self.bytes).map_err(|error| invalid_json(&error))
    }

    /// The values of some fields of the JSON object in it, as they are written there, which takes no memory: of a field
    /// that comes twice the last, as [`Received::object`] has it.
    pub(crate) fn fields<const N: usize>(
        &self,
        names: [&'static str; N],
    ) -> Result<[Option<&RawValue>; N], ApiError> {
        let mut json = serde_json::Deserializer::from_slice(&self.bytes);
        let found = json.deserialize_map(Fields(names));
        let found = found.and_then(|found| json.end().map(|()| found));
        found.map_err(|error| invalid_json(&error))
    }
}

/// Looks for fields of these names.
struct Fields<const N: usize>([&'static str; N]);

impl<'de, const N: usize> Visitor<'de> for Fields<N> {
    type Value = [Option<&'de RawValue>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(place) = map.next_key_seed(Key(&self.0))? {
            let value = map.next_value::<&'de RawValue>()?;
            if let Some(place) = place {
                found[place] = Some(value);
            }
        }
        Ok(found)
    }
}

/// Which of these names a key is, which may be as long as a body and is not copied.
struct Key<'a>(&'a [&'static str]);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, key: D) -> Result<Self::Value, D::Error> {
        key.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|name| *name == key))
    }
}

fn invalid_json(error: &serde_json::Error) -> ApiError {
    ApiError::new(
        StatusCode::BAD_REQUEST,
        "invalid_json",
        not_an_object(error),
    )
}

/// `object` as a `T`; fields it does not know are noted as ignored.
pub(crate) fn read<T: DeserializeOwned>(
    object: Map<String, Value>,
    ignored: &mut Ignored,
) -> Result<T, ApiError> {
    let mut track = serde_path_to_error::Track::new();
    let mut refused = Ok(());
    let mut note = |path: serde_ignored::Path<'_>| {
        if refused.is_ok() {
            let mut name = String::new();
            write_path(&path, &mut name);
            refused = ignored.note(&name);
        }
    };
    let value = serde_path_to_error::Deserializer::new(Value::Object(object), &mut track);
    let read = T::deserialize(serde_ignored::Deserializer::new(value, &mut note));
    let value = read.map_err(|error| {
        let path = track.path().to_string();
        let error = error.to_string();
        let message = reworded(&error);
        match (path.as_str(), missing(&error)) {
            (".", Some(field)) => ApiError::field(field, message),
            (".", None) => ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message),
            _ => ApiError::field(path.clone(), format!("`{path}`: {message}")),
        }
    })?;
    refused.map(|()| value)
}

/// A path as errors have it, such as `messages[0].content`.
fn write_path(path: &serde_ignored::Path<'_>, name: &mut String) {
    use serde_ignored::Path;
    match path {
        Path::Root => {}
        Path::Seq { parent, index } => {
            write_path(parent, name);
            *name += &format!("[{index}]");
        }
        Path::Map { parent, key } => {
            write_path(parent, name);
            if !name.is_empty() {
                name.push('.');
            }
            *name += key;
        }
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => write_path(parent, name),
    }
}

fn not_an_object(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    match error.classify() {
        Category::Data => "the body is JSON, but not an object; send `{...}`".to_owned(),
        Category::Eof => "the body ends before its JSON does".to_owned(),
        _ => format!(
            "the body is not JSON, or nested too deep: see line {line}, column {column} of it"
        ),
    }
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        format!("the body has more than the {limit} bytes that are accepted"),
    )
}

/// Reads what is left of a body into nothing.
async fn discard(body: &mut BodyDataStream) {
    let discarded = async {
        let mut bytes = 0;
        while let Some(Ok(chunk)) = next(body).await {
            bytes += chunk.len();
            if bytes > DISCARDED_BYTES {
                break;
            }
        }
    };
    tokio::time::timeout(DISCARD, discarded).await.ok();
}

/// The next item of a stream.
async fn next<S: futures_core::Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    std::future::poll_fn(|context| std::pin::Pin::new(&mut *stream).poll_next(context)).await
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Outer {
        list: Vec<Option<Inner>>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        known: u32,
    }

    fn outer(value: Value, ignored: &mut Ignored) -> Result<Outer, ApiError> {
        let Value::Object(object) = value else {
            panic!("an object");
        };
        read(object, ignored)
    }

    #[test]
    fn unknown_fields_are_named_wherever_they_are() {
        let body =
            json!({"list": [{"known": 1, "x": {"y": 2}}, null, {"known": 2, "z": 0}], "w": []});
        let mut ignored = Ignored::new(false);
        let read = outer(body.clone(), &mut ignored).expect("valid");
        let known = read.list.iter().flatten().map(|inner| inner.known);
        assert_eq!(known.collect::<Vec<_>>(), [1, 2]);
        let mut named: Vec<&str> = ignored.paths().split(',').collect();
        named.sort_unstable();
        assert_eq!(named, ["list[0].x", "list[2].z", "w"]);
        let error = outer(body, &mut Ignored::new(true))
            .expect_err("strict")
            .body();
        assert_eq!(error["error"]["param"], "list[0].x");
    }

    #[test]
    fn a_wrong_value_is_named_whatever_else_is_ignored() {
        let body = json!({"a": 1, "list": [{"known": "one"}]});
        let error = outer(body, &mut Ignored::new(false))
            .expect_err("not a number")
            .body();
        assert_eq!(error["error"]["param"], "list[0].known");
    }
}
