//! Requests to a hub: the list of a repository's files, and their contents.

use std::fmt::{self, Write as _};
use std::io::Read;
use std::time::Duration;

use ring::digest;
use serde::Deserialize;
use ureq::Body;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode, Uri, header};

use super::cache::Partial;
use super::error::Error;
use super::settings::{Settings, without_user};
use super::{ContentHash, Listing, RemoteFile};
use crate::progress::Progress;
use crate::source::{HubId, is_relative};

/// How long to wait for a connection, for an answer, and for each piece of a body.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest list of files read.
const LIST_LIMIT: u64 = 64 << 20;
/// How often a request is sent on: a hub does so once to a new name, and once to storage.
const MOST_REDIRECTS: usize = 10;
/// Bytes read at a time.
const PIECE: usize = 1 << 18;
/// The longest file taken when neither the list nor the answer says how long it is. Hubs say it of
/// weights; what is left are configurations and tokenizers, of which the largest have tens of MB.
const UNDECLARED_LIMIT: u64 = 64 << 20;

pub(super) struct Client {
    agent: ureq::Agent,
    endpoint: String,
    token: Option<String>,
}

/// Neither the token nor the user that an address may name; [`Settings`] show the rest.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// The hub's answer about a repository.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Followed in `call`, which knows who may see the token; ureq compares hosts without ports.
            .max_redirects(0)
            .redirect_auth_headers(RedirectAuthHeaders::Never)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_TIMEOUT))
            .timeout_per_read(Some(SILENCE_TIMEOUT))
            .user_agent(concat!("lacuna/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.into(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
        }
    }

    /// The files of a repository at a revision.
    pub(super) fn list(&self, id: &HubId, revision: &str) -> Result<Listing, Error> {
        let revision = escape(revision, false);
        let url = format!(
            "{}/api/models/{}/revision/{revision}?blobs=true",
            self.endpoint,
            id.repository()
        );
        let response = self.get(&url, id, 0)?;
        let url = without_user(&url);
        let bad = |reason: String| Error::BadAnswer {
            url: url.clone(),
            reason,
        };
        let body = response
            .into_body()
            .into_with_config()
            .limit(LIST_LIMIT)
            .read_to_vec();
        let body = body.map_err(|error| Error::Unreachable {
            url: url.clone(),
            reason: error.to_string(),
        })?;
        let answer: Answer =
            serde_json::from_slice(&body).map_err(|error| bad(error.to_string()))?;
        if !is_hash(&answer.sha) {
            return Err(bad(format!("`{}` is no commit", answer.sha)));
        }
        let safe = answer
            .siblings
            .into_iter()
            .filter(|sibling| is_relative(&sibling.rfilename));
        let files = safe
            .map(|sibling| remote_file(sibling, &answer.sha))
            .collect();
        Ok(Listing {
            commit: answer.sha,
            files,
        })
    }

    /// Downloads the rest of a file into `partial`, and checks all of it: returns how many bytes that
    /// are. No more than the declared length is ever written.
    pub(super) fn download(
        &self,
        id: &HubId,
        commit: &str,
        file: &RemoteFile,
        partial: &mut Partial,
        progress: &mut dyn Progress,
    ) -> Result<u64, Error> {
        let name = escape(&file.path, true);
        let url = format!(
            "{}/{}/resolve/{commit}/{name}",
            self.endpoint,
            id.repository()
        );
        // Without a length there is no telling whether a partial file is too long: start over.
        if file
            .size
            .is_none_or(|size| partial.len().is_ok_and(|len| len > size))
        {
            partial.restart()?;
        }
        let mut transfer = Transfer::begin(file, partial)?;
        if file.size != Some(transfer.received) || transfer.received == 0 {
            let response = match self.get(&url, id, transfer.received) {
                // What is there is longer than what the server has: it cannot be continued.
                Err(Error::Status { status: 416, .. }) if transfer.received > 0 => {
                    transfer.restart()?;
                    self.get(&url, id, 0)
                }
                response => response,
            };
            transfer.accept(response?, progress)?;
        }
        transfer.finish()
    }

    /// Requests `url` from byte `start` on; an answer that is not a success is an error.
    fn get(&self, url: &str, id: &HubId, start: u64) -> Result<Response<Body>, Error> {
        let mut place = url.to_owned();
        let url = without_user(url);
        let unreachable = |reason: String| Error::Unreachable {
            url: url.clone(),
            reason,
        };
        let mut redirects = 0;
        let response = loop {
            let response = self.call(&place, start);
            let response = response.map_err(|error| {
                // Of a URL that it cannot use it shows all.
                unreachable(error.to_string().replace(&place, &without_user(&place)))
            })?;
            match redirected(&place, &response) {
                Some(_) if redirects == MOST_REDIRECTS => {
                    return Err(unreachable("it redirects again and again".to_owned()));
                }
                Some(next) => place = next,
                None => break response,
            }
            redirects += 1;
        };
        let status = response.status();
        match status.as_u16() {
            200 | 206 => Ok(response),
            status @ (401 | 403) => Err(Error::Refused {
                id: id.to_string(),
                status,
                page: format!("{}/{}", without_user(&self.endpoint), id.repository()),
            }),
            404 => Err(Error::NotFound { url }),
            status => Err(Error::Status { url, status }),
        }
    }
}

impl Client {
    /// Requests what is at `place`. The token is for the hub alone: contents are redirected to storage,
    /// and another port of the same host may be anyone's.
    fn call(&self, place: &str, start: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(place);
        let at_hub = origin(place).is_some_and(|asked| Some(asked) == origin(&self.endpoint));
        if let Some(token) = self.token.as_ref().filter(|_| at_hub) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        request.call()
    }
}

/// Scheme, host and port of a URL.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let usual = match scheme.as_str() {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let port = uri.port_u16().unwrap_or(usual);
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// Where an answer of what is at `place` sends whoever asked.
fn redirected(place: &str, response: &Response<Body>) -> Option<String> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let target = response.headers().get(header::LOCATION)?.to_str().ok()?;
    if target.contains("://")
        && target
            .parse::<Uri>()
            .is_ok_and(|uri| uri.scheme().is_some())
    {
        return Some(target.to_owned());
    }
    // What such a target leaves out is as in the place that it is relative to.
    let (scheme, rest) = place.split_once("://")?;
    let path = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(path);
    Some(match target.as_bytes() {
        [b'/', b'/', ..] => format!("{scheme}:{target}"),
        [b'/', ..] => format!("{scheme}://{authority}{target}"),
        _ => {
            let path = path.split(['?', '#']).next().unwrap_or_default();
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{target}")
        }
    })
}

fn remote_file(sibling: Sibling, commit: &str) -> RemoteFile {
    let Sibling {
        rfilename: path,
        size,
        blob_id,
        lfs,
    } = sibling;
    let of_length = |length: usize| move |hash: &String| hash.len() == length && is_hash(hash);
    // Of a large file Git has only what says where it is.
    let git = blob_id
        .clone()
        .filter(|_| lfs.is_none())
        .filter(of_length(40));
    let size = lfs.as_ref().and_then(|lfs| lfs.size).or(size);
    let sha256 = lfs.and_then(|lfs| lfs.sha256).filter(of_length(64));
    let blob = sha256.clone().or(blob_id.filter(|hash| is_hash(hash)));
    let hash = match (sha256, git) {
        (Some(hash), _) => Some(ContentHash::Sha256(hash.to_ascii_lowercase())),
        (None, Some(hash)) => Some(ContentHash::GitSha1(hash.to_ascii_lowercase())),
        (None, None) => None,
    };
    // Of this length whatever the path is, and of no other path.
    let own_name = || {
        let path = digest::digest(&digest::SHA256, path.as_bytes());
        format!("{commit}-{}", hex(path.as_ref()))
    };
    RemoteFile {
        blob: blob.unwrap_or_else(own_name),
        path,
        size,
        hash,
    }
}

/// Whether text is hexadecimal, and so can be a file name.
fn is_hash(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Percent-encodes what is not plain in a path, and `/` too unless it separates folders.
fn escape(text: &str, keep_slashes: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        if plain || (keep_slashes && byte == b'/') {
            escaped.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

/// One file on its way: how much is there, what it hashes to so far.
struct Transfer<'a> {
    file: &'a RemoteFile,
    partial: &'a mut Partial,
    received: u64,
    hash: digest::Context,
}

impl<'a> Transfer<'a> {
    fn begin(file: &'a RemoteFile, partial: &'a mut Partial) -> Result<Self, Error> {
        let mut hash = digest::Context::new(&digest::SHA256);
        let received = partial.resume(|bytes| hash.update(bytes))?;
        Ok(Self {
            file,
            partial,
            received,
            hash,
        })
    }

    /// Forgets what is there.
    fn restart(&mut self) -> Result<(), Error> {
        self.partial.restart()?;
        self.received = 0;
        self.hash = digest::Context::new(&digest::SHA256);
        Ok(())
    }

    fn accept(
        &mut self,
        response: Response<Body>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if response.status() != StatusCode::PARTIAL_CONTENT || !continues(&response, self.received)
        {
            self.restart()?;
        }
        if response.status() == StatusCode::PARTIAL_CONTENT && !continues(&response, self.received)
        {
            return Err(self.corrupt("the server sent another part than was asked for"));
        }
        let body = response.into_body();
        let rest = body.content_length();
        let announced = rest.map(|rest| self.received.saturating_add(rest));
        let total = self.file.size.or(announced);
        if let (Some(total), Some(announced)) = (total, announced)
            && announced > total
        {
            return Err(self.too_long(Some(total), announced)?);
        }
        progress.begin(&self.file.path, total);
        progress.advance(self.received);
        self.copy(body, total, progress)?;
        progress.finish();
        Ok(())
    }

    fn copy(
        &mut self,
        body: Body,
        total: Option<u64>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let most = total.unwrap_or(UNDECLARED_LIMIT);
        let mut reader = body.into_with_config().limit(u64::MAX).reader();
        let mut piece = vec![0; PIECE];
        loop {
            // One byte past the end shows that there is more; that byte is not written.
            let wanted = (most - self.received).saturating_add(1).min(PIECE as u64) as usize;
            match reader.read(&mut piece[..wanted]) {
                Ok(0) if total.is_none_or(|total| self.received >= total) => return Ok(()),
                Ok(0) => return Err(self.interrupted(total, "the connection was closed")),
                Ok(count) if count as u64 > most - self.received => {
                    return Err(self.too_long(total, self.received + count as u64)?);
                }
                Ok(count) => {
                    self.partial.append(&piece[..count])?;
                    self.hash.update(&piece[..count]);
                    self.received += count as u64;
                    progress.advance(count as u64);
                }
                Err(error) => return Err(self.interrupted(total, &error.to_string())),
            }
        }
    }

    /// Checks length and hash; what fails is discarded, since continuing it could not help.
    fn finish(self) -> Result<u64, Error> {
        let wrong = match (self.file.size, &self.file.hash) {
            (Some(size), _) if size != self.received => {
                Some(format!("{} bytes instead of {size}", self.received))
            }
            (_, Some(ContentHash::Sha256(hash))) => {
                let found = hex(self.hash.clone().finish().as_ref());
                (*hash != found).then(|| format!("SHA-256 {found} instead of {hash}"))
            }
            (_, Some(ContentHash::GitSha1(hash))) => {
                let found = git_sha1(self.received, self.partial)?;
                (*hash != found).then(|| format!("Git's SHA-1 {found} instead of {hash}"))
            }
            (_, None) => None,
        };
        let Some(reason) = wrong else {
            return Ok(self.received);
        };
        self.partial.restart()?;
        Err(self.corrupt(&reason))
    }

    /// Discards what is there: contents of another length cannot become the right ones.
    fn too_long(&mut self, declared: Option<u64>, received: u64) -> Result<Error, Error> {
        self.partial.restart()?;
        let file = self.file.path.clone();
        Ok(match declared {
            Some(declared) => Error::TooLong {
                file,
                declared,
                received,
            },
            None => Error::Undeclared {
                file,
                limit: UNDECLARED_LIMIT,
            },
        })
    }

    fn interrupted(&self, expected: Option<u64>, reason: &str) -> Error {
        let (file, received) = (self.file.path.clone(), self.received);
        Error::Interrupted {
            file,
            received,
            expected,
            reason: reason.to_owned(),
        }
    }

    fn corrupt(&self, reason: &str) -> Error {
        Error::Corrupt {
            file: self.file.path.clone(),
            reason: reason.to_owned(),
        }
    }
}

/// What Git calls contents of so many bytes by. They are read once more, since the length is hashed first and may not have
/// been known; files of this kind are small.
fn git_sha1(bytes: u64, contents: &mut Partial) -> Result<String, Error> {
    let mut hash = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(format!("blob {bytes}\0").as_bytes());
    contents.resume(|part| hash.update(part))?;
    Ok(hex(hash.finish().as_ref()))
}

/// Whether a partial answer begins at byte `start`.
fn continues(response: &Response<Body>, start: u64) -> bool {
    let range = response
        .headers()
        .get(header::CONTENT_RANGE)
        .and_then(|range| range.to_str().ok());
    range.is_some_and(|range| range.starts_with(&format!("bytes {start}-")))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_relative_to_the_place_that_was_asked() {
        let place = "http://user:word@hub:8080/a/b?c=/d";
        for (target, expected) in [
            (
                "https://storage/x?y=http://z",
                "https://storage/x?y=http://z",
            ),
            ("//storage/x", "http://storage/x"),
            ("/x?y=http://z", "http://user:word@hub:8080/x?y=http://z"),
            ("x", "http://user:word@hub:8080/a/x"),
        ] {
            let response = Response::builder()
                .status(302)
                .header(header::LOCATION, target)
                .body(Body::builder().data(""))
                .unwrap();
            assert_eq!(redirected(place, &response).as_deref(), Some(expected));
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| origin(a).is_some() && origin(a) == origin(b);
        assert!(same("https://Hub/a", "https://user:word@hub:443/b?c"));
        assert!(!same("https://hub", "http://hub"));
        assert!(!same("http://hub:1", "http://hub:2"));
        assert!(!same("http://hub", "http://hub.other"));
        assert!(!same("http://hub@other", "http://hub"));
    }
}
