//! Who may use the server.
//!
//! With keys, whoever presents one. Without, whoever is on this machine: the address is loopback
//! then, and what is left to keep out are web pages from elsewhere in a browser on this machine,
//! which give themselves away by a foreign `Origin` or, after rebinding a name, a foreign `Host`.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::http::doors::Doors;
use crate::http::error::ApiError;
use crate::keys::ApiKeys;
use crate::sharing::Client;

/// Where clients of Anthropic present their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Lets a request through, with the [`Client`] it is from, or answers it with 400, 401 or 403.
pub(crate) async fn guard(
    State(doors): State<Doors>,
    mut request: Request,
    next: Next,
) -> Response {
    match check(&doors, &request) {
        Ok(client) => {
            request.extensions_mut().insert(client);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

fn check(doors: &Doors, request: &Request) -> Result<Client, ApiError> {
    let headers = request.headers();
    let host = host(request)?;
    same_site(doors, headers, host.as_ref())?;
    local_name(&doors.keys, host.as_ref())?;
    key(&doors.keys, request.uri().path(), headers)
}

/// The name and port that the client knows the server by. Only HTTP/1.0 may leave it out; a target
/// that is a whole URL says it instead of the header (RFC 9112, 3.2).
fn host(request: &Request) -> Result<Option<Authority>, ApiError> {
    let bad = |message| {
        Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_host",
            message,
        ))
    };
    let mut headers = request.headers().get_all(header::HOST).iter();
    let host = match (headers.next(), headers.next()) {
        (Some(host), None) => host.as_bytes(),
        (None, _) if request.version() < Version::HTTP_11 => return Ok(None),
        (None, _) => return bad("the request has no `Host`"),
        (Some(_), Some(_)) => return bad("the request has more than one `Host`"),
    };
    match Authority::try_from(host) {
        Ok(host) if !host.as_str().contains('@') => {
            Ok(Some(request.uri().authority().cloned().unwrap_or(host)))
        }
        _ => bad("`Host` is not a name or address"),
    }
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Browsers say which page a request comes from; only the server's own may send any, and those of sites that are let in.
fn same_site(doors: &Doors, headers: &HeaderMap, host: Option<&Authority>) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let origin = origin.to_str().unwrap_or("");
    if doors.admits(origin) {
        return Ok(());
    }
    let site = origin
        .strip_prefix("http://")
        .or(origin.strip_prefix("https://"));
    if site.is_some() && site == host.map(Authority::as_str) {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::FORBIDDEN,
        "foreign_origin",
        "requests from web pages of other sites are refused",
    ))
}

/// Without keys, the name the client used must be one that always means this machine.
fn local_name(keys: &ApiKeys, host: Option<&Authority>) -> Result<(), ApiError> {
    let local = host.is_none_or(|host| is_local(host.host()));
    if local || !keys.is_empty() || keys.is_open_to_all() {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::FORBIDDEN,
        "foreign_host",
        "without an API key the server answers to `localhost` and to addresses only",
    ))
}

fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.to_ascii_lowercase().ends_with(".localhost")
        || bare.parse::<IpAddr>().is_ok()
}

fn key(keys: &ApiKeys, path: &str, headers: &HeaderMap) -> Result<Client, ApiError> {
    if keys.is_empty() || matches!(path, "/health" | "/ready") || crate::page::is_asset(path) {
        return Ok(Client(None));
    }
    let bearer = text(headers, header::AUTHORIZATION)
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim());
    let presented: Vec<&str> = bearer.into_iter().chain(text(headers, API_KEY)).collect();
    // Clients of Anthropic may send both, one of them meant for another service.
    match presented.iter().find_map(|presented| keys.find(presented)) {
        Some(number) => Ok(Client(Some(number))),
        None if presented.is_empty() => Err(unauthorized(
            "an API key is needed: send `Authorization: Bearer KEY`, or `x-api-key: KEY`",
        )),
        None => Err(unauthorized("the API key is not one of this server's")),
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
}

#[cfg(test)]
mod tests {
    use super::is_local;

    #[test]
    fn only_names_that_cannot_be_rebound_are_local() {
        for host in [
            "localhost",
            "LOCALHOST",
            "a.localhost",
            "127.0.0.1",
            "[::1]",
            "10.1.2.3",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "notlocalhost", ""] {
            assert!(!is_local(host), "{host}");
        }
    }
}
