//! Addresses as ZeroMQ writes them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// `tcp://HOST:PORT`, where the host is an address or `*` for all of this machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventAddress(pub SocketAddr);

/// Text that is no [`EventAddress`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address to listen on; expected tcp://*:5557 or tcp://127.0.0.1:5557")]
pub struct NoEventAddress(String);

impl FromStr for EventAddress {
    type Err = NoEventAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let address = text.strip_prefix("tcp://").unwrap_or(text);
        let everywhere = |port: &str| {
            let port = port.parse().ok()?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port))
        };
        let parsed = match address.strip_prefix("*:") {
            Some(port) => everywhere(port),
            None => address.parse().ok(),
        };
        parsed
            .map(Self)
            .ok_or_else(|| NoEventAddress(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_this_machine() {
        let parsed = |text: &str| {
            text.parse::<EventAddress>()
                .map(|parsed| parsed.0.to_string())
        };
        assert_eq!(parsed("tcp://*:5557"), Ok("0.0.0.0:5557".to_owned()));
        assert_eq!(parsed("tcp://127.0.0.1:0"), Ok("127.0.0.1:0".to_owned()));
        assert_eq!(parsed("[::1]:80"), Ok("[::1]:80".to_owned()));
        for wrong in [
            "",
            "tcp://*",
            "tcp://host:1",
            "ipc:///tmp/x",
            "*:70000",
            "127.0.0.1",
        ] {
            assert_eq!(parsed(wrong), Err(NoEventAddress(wrong.to_owned())));
        }
    }
}
