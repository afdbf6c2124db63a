//! Images that are elsewhere: fetched from hosts that the server was told of, and from nowhere else.
//!
//! Where an address leads is decided once: a host's name is resolved, what it may not be is left out, and the
//! connection goes to what is left. So a name that resolves to something else a moment later gains nothing. A host
//! that is named must be out in the world; one within the machine or its networks is reached only where its address
//! itself was named. Redirects are followed as far as they stay with hosts that were named.
//!
//! The client blocks, so each fetch has a thread of its own for as long as it takes, and there are a few at once.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lacuna_engine::{HeldMemory, ImageLimits, MemoryRefusal, RequestMemory};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use ureq::Agent;
use ureq::http::uri::Uri;
use ureq::http::{StatusCode, header};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use crate::http::error::ApiError;
use crate::images::{self, Image};

/// Images that are fetched at once; others wait.
const FETCHES: usize = 8;

/// Redirects of an image at most.
const REDIRECTS: usize = 4;

/// What is taken of memory for an image of unknown size at first.
const FIRST_BYTES: usize = 64 << 10;

/// A host that images are fetched from: a name or an address, with a port unless it is the usual one of the protocol.
/// Names are compared as they are, without those below them.
///
/// ```
/// # use lacuna_server::ImageHost;
/// assert!("images.example.com".parse::<ImageHost>().is_ok());
/// assert!("192.0.2.7:8000".parse::<ImageHost>().is_ok());
/// assert!("https://example.com/".parse::<ImageHost>().is_err());
/// assert!("*.example.com".parse::<ImageHost>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageHost {
    host: Host,
    port: Option<NonZeroU16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    /// In small letters.
    Name(String),
    Address(IpAddr),
}

/// A text that names no host.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{text}` names no host that images can be fetched from: give a name or an address as it is in theirs, such as \
     images.example.com, 192.0.2.7:8000 or [::1]:8000, without https:// and without *"
)]
pub struct NoImageHost {
    text: String,
}

impl FromStr for ImageHost {
    type Err = NoImageHost;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = || {
            if let Ok(address) = text.parse() {
                let host = Host::Address(address);
                return Some(Self { host, port: None });
            }
            let colon = text.rfind(':').filter(|_| !text.ends_with(']'));
            let (host, port) = match colon {
                Some(colon) => (&text[..colon], Some(text[colon + 1..].parse().ok()?)),
                None => (text, None),
            };
            let host = Host::read(host)?;
            Some(Self { host, port })
        };
        read().ok_or_else(|| NoImageHost { text: text.into() })
    }
}

impl Host {
    /// As it is in addresses, those of six parts in brackets.
    fn read(text: &str) -> Option<Self> {
        if let Some(inner) = text.strip_prefix('[') {
            let address: Ipv6Addr = inner.strip_suffix(']')?.parse().ok()?;
            return Some(Self::Address(address.into()));
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Some(Self::Address(address.into()));
        }
        let part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let is_name = !text.is_empty() && text.bytes().all(part);
        is_name.then(|| Self::Name(text.to_ascii_lowercase()))
    }
}

impl ImageHost {
    /// Whether `address` leads there.
    fn is_of(&self, address: &Uri) -> bool {
        let usual = match address.scheme_str() {
            Some("http") => 80,
            Some("https") => 443,
            _ => return false,
        };
        let port = address.port_u16().unwrap_or(usual);
        let host = address.host().and_then(Host::read);
        host.as_ref() == Some(&self.host) && port == self.port.map_or(usual, NonZeroU16::get)
    }
}

/// Why an image is not fetched.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("it is no address: send one such as https://images.example.com/cat.png")]
    Unreadable,
    #[error(
        "images are not fetched from there; send the image itself, as data:image/png;base64,..., or have that host allowed \
         where the server is started"
    )]
    Host,
    #[error(
        "it redirects to where images are not fetched from; have that host allowed too, where the server is started"
    )]
    Redirect,
    #[error("it redirects more than {REDIRECTS} times")]
    Redirects,
    #[error(
        "its name leads to this machine or its own networks; an address there has to be allowed as an address, such as \
         127.0.0.1:8000"
    )]
    Inside,
    #[error("the host answers {0} and not with an image")]
    Status(StatusCode),
    #[error("it has more than the {limit} bytes that an image may have")]
    TooLarge { limit: usize },
    #[error("it takes too long to arrive")]
    TooSlow,
    #[error("the host cannot be reached, or breaks off")]
    Unreachable,
    #[error("the system gives no thread to fetch it; try again in a moment")]
    NoThread,
    #[error(transparent)]
    Memory(#[from] MemoryRefusal),
}

impl Refusal {
    fn of(error: &ureq::Error) -> Self {
        match error {
            ureq::Error::Timeout(_) => Self::TooSlow,
            ureq::Error::Other(other) if other.is::<Inside>() => Self::Inside,
            _ => Self::Unreachable,
        }
    }

    /// The body of a response is read as if it were a file.
    fn of_reading(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(error) => Self::of(error),
            None if error.kind() == io::ErrorKind::TimedOut => Self::TooSlow,
            None => Self::Unreachable,
        }
    }

    fn told(self, field: &str) -> ApiError {
        match self {
            Self::Memory(refusal) => refusal.into(),
            error => ApiError::field(field, format!("`{field}` cannot be fetched: {error}"))
                .with_code("invalid_image_url"),
        }
    }
}

/// Fetches images, a few at a time.
#[derive(Debug)]
pub(crate) struct Fetcher {
    hosts: Arc<[ImageHost]>,
    /// How long all images of a request may take.
    time: Duration,
    places: Arc<Semaphore>,
}

impl Fetcher {
    pub(crate) fn new(hosts: &[ImageHost], time: Duration) -> Self {
        Self {
            hosts: hosts.into(),
            time,
            places: Arc::new(Semaphore::new(FETCHES)),
        }
    }

    /// Refuses an address that is not to be followed.
    pub(crate) fn check(&self, address: &str, field: &str) -> Result<Uri, ApiError> {
        if self.hosts.is_empty() {
            return Err(images::not_fetched(field));
        }
        let found = read(address).and_then(|address| match allows(&self.hosts, &address) {
            true => Ok(address),
            false => Err(Refusal::Host),
        });
        found.map_err(|refusal| refusal.told(field))
    }

    /// Puts the files of images that are elsewhere in their places, one after the other. Returns the memory that has
    /// been taken for them.
    ///
    /// # Errors
    /// [`ApiError`] for the first that cannot be had.
    pub(crate) async fn fetch(
        &self,
        images: &mut [Image],
        memory: &RequestMemory,
    ) -> Result<HeldMemory, ApiError> {
        let deadline = Instant::now() + self.time;
        let mut held = memory.try_take(0)?;
        for image in images {
            let Image::Address { address, field } = image else {
                continue;
            };
            let address = self.check(address, field)?;
            let fetched = self.one(address, memory.clone(), deadline);
            let in_time = tokio::time::timeout_at(deadline.into(), fetched).await;
            let fetched = in_time.unwrap_or(Err(Refusal::TooSlow));
            let (file, bytes) = fetched.map_err(|refusal| refusal.told(field))?;
            held.merge(bytes);
            *image = Image::File(file.into());
        }
        Ok(held)
    }

    async fn one(
        &self,
        address: Uri,
        memory: RequestMemory,
        deadline: Instant,
    ) -> Result<(Vec<u8>, HeldMemory), Refusal> {
        // The semaphore is never closed.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (done, fetched) = oneshot::channel();
        let fetch = Fetch {
            hosts: Arc::clone(&self.hosts),
            memory,
            deadline,
            _place: place,
        };
        let thread = thread::Builder::new().name("lacuna-fetch".to_owned());
        let work = move || done.send(fetch.follow(address)).ok();
        thread.spawn(work).map_err(|_| Refusal::NoThread)?;
        fetched.await.unwrap_or(Err(Refusal::Unreachable))
    }
}

/// One fetch, on its thread.
struct Fetch {
    hosts: Arc<[ImageHost]>,
    memory: RequestMemory,
    deadline: Instant,
    _place: Option<OwnedSemaphorePermit>,
}

impl Fetch {
    fn follow(&self, mut address: Uri) -> Result<(Vec<u8>, HeldMemory), Refusal> {
        for _ in 0..=REDIRECTS {
            let mut response = self.get(&address)?;
            let status = response.status();
            if status.is_redirection()
                && let Some(location) = response.headers().get(header::LOCATION)
            {
                let location = location.to_str().map_err(|_| Refusal::Redirect)?;
                address = redirected(&address, location).ok_or(Refusal::Redirect)?;
                if !allows(&self.hosts, &address) {
                    return Err(Refusal::Redirect);
                }
                continue;
            }
            if status != StatusCode::OK {
                return Err(Refusal::Status(status));
            }
            return self.body(response.body_mut());
        }
        Err(Refusal::Redirects)
    }

    /// A connection of its own, so that none leads where it was once allowed to.
    fn get(&self, address: &Uri) -> Result<ureq::http::Response<ureq::Body>, Refusal> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let config = Agent::config_builder()
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_global(Some(left))
            .user_agent(concat!("lacuna/", env!("CARGO_PKG_VERSION")))
            .accept("image/png, image/jpeg, image/webp, image/gif")
            .build();
        let agent = Agent::with_parts(config, DefaultConnector::default(), Outside::default());
        agent.get(address).call().map_err(|it| Refusal::of(&it))
    }

    /// The whole of a body, in memory that is taken as it comes.
    fn body(&self, body: &mut ureq::Body) -> Result<(Vec<u8>, HeldMemory), Refusal> {
        let limit = ImageLimits::default().bytes;
        let announced = body.content_length();
        let announced = announced.map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        if announced.is_some_and(|bytes| bytes > limit) {
            return Err(Refusal::TooLarge { limit });
        }
        // A byte more, so that the end is seen.
        let mut held = self
            .memory
            .try_take(announced.map_or(FIRST_BYTES, |it| it + 1))?;
        let mut file = vec![0; held.bytes()];
        let (mut length, mut reader) = (0, body.as_reader());
        loop {
            let read = reader.read(&mut file[length..]);
            match read.map_err(|error| Refusal::of_reading(&error))? {
                0 => break,
                read => length += read,
            }
            if length > limit {
                return Err(Refusal::TooLarge { limit });
            }
            if length == file.len() {
                held.resize((2 * length).min(limit + 1))?;
                file.resize(held.bytes(), 0);
            }
        }
        file.truncate(length);
        Ok((file, held))
    }
}

/// A whole address, without a name and password in it, which belong to nobody here.
fn read(address: &str) -> Result<Uri, Refusal> {
    let address: Uri = address.parse().map_err(|_| Refusal::Unreadable)?;
    let authority = address.authority().ok_or(Refusal::Unreadable)?;
    let is_whole = address.scheme().is_some() && !authority.host().is_empty();
    match is_whole && !authority.as_str().contains('@') {
        true => Ok(address),
        false => Err(Refusal::Unreadable),
    }
}

fn allows(hosts: &[ImageHost], address: &Uri) -> bool {
    hosts.iter().any(|host| host.is_of(address))
}

/// Where `location` leads from `address`: a whole address, or a path from the root of the same host, which is all that
/// anybody sends.
fn redirected(address: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (address.scheme_str()?, address.authority()?);
    let whole = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        location.to_owned()
    };
    read(&whole).ok()
}

/// Resolves names to what is out in the world. Addresses that stand for themselves have been named as such.
#[derive(Debug, Default)]
struct Outside(DefaultResolver);

/// A name that leads to no place out in the world.
#[derive(Debug, thiserror::Error)]
#[error("the name leads to this machine or its own networks")]
struct Inside;

impl Resolver for Outside {
    fn resolve(
        &self,
        uri: &Uri,
        config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        let host = uri.host().and_then(Host::read);
        if matches!(host, Some(Host::Address(_))) {
            return Ok(found);
        }
        let mut outside = self.empty();
        let addresses = found.iter().filter(|it| is_outside(it.ip()));
        addresses.for_each(|address: &SocketAddr| outside.push(*address));
        match outside.is_empty() {
            true => Err(ureq::Error::Other(Box::new(Inside))),
            false => Ok(outside),
        }
    }
}

/// Whether an address is one of the world, and not of this machine, of a network of its own, or of none.
fn is_outside(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_outside_v4(address),
        IpAddr::V6(address) => is_outside_v6(address),
    }
}

/// By the registry of special-purpose addresses (RFC 6890 and its successors).
fn is_outside_v4(address: Ipv4Addr) -> bool {
    let [first, second, third, _] = address.octets();
    let special = address.is_loopback()
        || address.is_private()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || matches!(
            (first, second, third),
            // This network; shared by carriers; protocols; relays of 6to4; benchmarks; reserved.
            (0, ..)
                | (100, 64..=127, _)
                | (192, 0, 0)
                | (192, 88, 99)
                | (198, 18 | 19, _)
                | (240.., ..)
        );
    !special
}

fn is_outside_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let [.., high, low] = segments;
    let [a, b] = high.to_be_bytes();
    let [c, d] = low.to_be_bytes();
    let last = Ipv4Addr::new(a, b, c, d);
    match segments {
        // Addresses of the other kind in those of this one: as they are, and translated.
        [0, 0, 0, 0, 0, 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => is_outside_v4(last),
        // What is given out to the world is 2000::/3; of that protocols, documentation and 6to4 are not.
        [0x2001, 0..=0x01ff, ..]
        | [0x2001, 0x0db8, ..]
        | [0x2002, ..]
        | [0x3fff, 0..=0x0fff, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> ImageHost {
        text.parse().unwrap_or_else(|_| panic!("{text}"))
    }

    fn is_of(named: &str, address: &str) -> bool {
        read(address).is_ok_and(|address| host(named).is_of(&address))
    }

    #[test]
    fn a_host_is_the_one_that_was_named_with_its_port() {
        for (named, address) in [
            ("example.com", "https://example.com/a.png"),
            ("example.com", "http://EXAMPLE.com:80/a.png?x#y"),
            ("Example.com:8080", "http://example.com:8080/"),
            ("127.0.0.1:9", "http://127.0.0.1:9/"),
            ("::1", "http://[::1]/"),
            ("[::1]:9", "http://[0:0::1]:9/"),
        ] {
            assert!(is_of(named, address), "{named} {address}");
        }
        for (named, address) in [
            ("example.com", "https://a.example.com/"),
            ("example.com", "https://example.com.evil/"),
            ("example.com", "https://example.com:8443/"),
            ("example.com", "https://example.com:80/"),
            ("example.com:8080", "http://example.com/"),
            ("example.com", "ftp://example.com/"),
            ("example.com", "https://evil@example.com/"),
            ("example.com", "https://example.com@evil/"),
            ("127.0.0.1", "http://localhost/"),
            ("localhost", "http://127.0.0.1/"),
        ] {
            assert!(!is_of(named, address), "{named} {address}");
        }
        for wrong in [
            "",
            "*",
            "https://example.com",
            "example.com/",
            "a:0",
            "a:b",
            ":80",
            "[::1",
            "a b",
        ] {
            assert!(wrong.parse::<ImageHost>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_within_the_machine_and_its_networks_is_not_outside() {
        let outside = |text: &str| is_outside(text.parse().expect("an address"));
        for inside in [
            "127.0.0.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "255.255.255.255",
            "224.0.0.1",
            "198.18.0.1",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "::127.0.0.1",
            "2002:7f00:1::",
            "2001:db8::1",
        ] {
            assert!(!outside(inside), "{inside}");
        }
        for address in [
            "8.8.8.8",
            "172.32.0.1",
            "100.128.0.1",
            "2606:4700::1",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
        ] {
            assert!(outside(address), "{address}");
        }
    }

    #[test]
    fn redirects_lead_to_whole_addresses_and_paths_of_the_same_host() {
        let from: Uri = "https://example.com:8443/a/b?c"
            .parse()
            .expect("an address");
        let to = |location: &str| redirected(&from, location).map(|it| it.to_string());
        assert_eq!(to("/d?e").as_deref(), Some("https://example.com:8443/d?e"));
        assert_eq!(
            to("//other.example/x").as_deref(),
            Some("https://other.example/x")
        );
        assert_eq!(
            to("http://127.0.0.1/").as_deref(),
            Some("http://127.0.0.1/")
        );
        assert_eq!(to("d"), None);
        assert_eq!(to(""), None);
    }
}
