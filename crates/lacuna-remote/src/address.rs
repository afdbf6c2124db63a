//! What an address and the environment say of a store.

use std::collections::BTreeMap;
use std::sync::Arc;

use lacuna_kv::folder::remote::RemoteStore;
use opendal::{Operator, OperatorRegistry};

use crate::store::ObjectStore;

/// Why an address leads to no store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// There is something in it that others would see in a list of processes.
    #[error(
        "`{0}...` says more than where the store is; name what comes after it in {PREFIX}* variables"
    )]
    Secrets(String),
    /// No service has that scheme.
    #[error("no store is reached by `{scheme}`; it is one of {known}")]
    Scheme {
        /// What comes before `://`.
        scheme: String,
        /// Those that there are.
        known: String,
    },
    /// The service does not take it.
    #[error("the store `{address}` cannot be used: {said}")]
    Refused {
        /// The address.
        address: String,
        /// What the service says.
        said: String,
    },
    /// The system has no threads for it.
    #[error("no threads can be had for the store: {0}")]
    Threads(std::io::Error),
}

/// Variables of the environment that begin so are options of the store: what follows is the option's name.
const PREFIX: &str = "LACUNA_REMOTE_";

/// The store at `address`, such as `s3://bucket/folder`, with options and credentials from the environment: those that
/// the service looks for itself (`AWS_ACCESS_KEY_ID`), and `LACUNA_REMOTE_<OPTION>` for any option that `opendal` has
/// for it (`LACUNA_REMOTE_PASSWORD`). Nothing is asked of the store yet.
///
/// # Errors
/// [`AddressError`].
pub fn open(address: &str) -> Result<Arc<dyn RemoteStore>, AddressError> {
    let options = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.to_str()?.strip_prefix(PREFIX)?.to_ascii_lowercase();
        Some((name, value.to_str()?.to_owned()))
    });
    open_with(address, options.collect())
}

/// The same with just these options.
///
/// # Errors
/// [`AddressError`].
pub fn open_with(
    address: &str,
    mut options: BTreeMap<String, String>,
) -> Result<Arc<dyn RemoteStore>, AddressError> {
    let (scheme, place) = split(address)?;
    opendal::init_default_registry();
    let known = OperatorRegistry::get().schemes();
    if !known.contains(&scheme) {
        let mut known: Vec<String> = known.into_iter().collect();
        known.sort();
        let known = known.join(", ");
        return Err(AddressError::Scheme { scheme, known });
    }
    // Of a process that has another provider already, that one is used.
    let provider = rustls::crypto::ring::default_provider();
    provider.install_default().ok();
    opendal_http_transport_reqwest::install_default();
    let refused = |error: opendal::Error| AddressError::Refused {
        address: address.to_owned(),
        said: error.message().to_owned(),
    };
    if ["fs", "file"].contains(&&*scheme) {
        // Files get their names when they are whole.
        let parts = options.entry("atomic_write_dir".to_owned());
        parts.or_insert_with(|| format!("{place}/.part"));
    }
    let uri = opendal::OperatorUri::new(address, options).map_err(refused)?;
    let operator = Operator::from_uri(uri).map_err(refused)?;
    let store = ObjectStore::new(operator, address.to_owned());
    Ok(Arc::new(store.map_err(AddressError::Threads)?))
}

/// The scheme of an address, and what follows, if that is nothing but a place and a path.
fn split(address: &str) -> Result<(String, &str), AddressError> {
    // Users and passwords come before `@`, options behind `?`.
    if let Some(at) = address.find(['@', '?', '#']) {
        let shown = match address[at..].starts_with('@') {
            true => address.find("://").map_or(0, |scheme| scheme + 3),
            false => at,
        };
        return Err(AddressError::Secrets(address[..shown].to_owned()));
    }
    let (scheme, place) = address.split_once("://").unwrap_or(("", address));
    Ok((scheme.to_ascii_lowercase(), place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_hold_secrets_are_refused_without_saying_them() {
        for (address, shown) in [
            ("s3://key:word@bucket/a", "`s3://...`"),
            ("s3://bucket/a?secret_access_key=word", "`s3://bucket/a...`"),
            ("https://host/a#word", "`https://host/a...`"),
        ] {
            let error = open_with(address, BTreeMap::new()).expect_err("refused");
            let said = error.to_string();
            assert!(said.contains(shown) && !said.contains("word"), "{said}");
        }
    }

    #[test]
    fn schemes_are_those_that_are_compiled_in() {
        for address in ["bucket", "ftp://host/a"] {
            let error = open_with(address, BTreeMap::new()).expect_err("refused");
            let said = error.to_string();
            for scheme in ["azblob", "gcs", "http", "https", "s3", "webdav"] {
                assert!(said.contains(scheme), "{said}");
            }
        }
        let error = open_with("s3://", BTreeMap::new()).expect_err("refused");
        assert!(matches!(error, AddressError::Refused { .. }), "{error}");
    }
}
