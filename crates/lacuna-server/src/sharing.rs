//! Which requests share computed prompts.
//!
//! What one API key has asked is none of another's business, yet `cached_tokens` and the time to the
//! first token would tell. So the prefix cache is separated by key, and within a key by the request's
//! `cache_salt`, as other servers have it.
//!
//! Where the prefix cache is kept in a folder, so is the secret, and a key that comes again finds what it left.

use std::fs;
use std::io;
use std::path::Path;

use lacuna_kv::prefix::Namespace;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use crate::keys::ApiKeys;

/// Who sent a request: which of the keys was presented, or nobody in particular without keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Client(pub(crate) Option<u32>);

/// Derives namespaces of the prefix cache.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// Of this process alone, or of a cache folder, so that nobody can look for salts whose namespaces collide.
    secret: hmac::Key,
    /// What stands for each key, whatever its place among them.
    keys: Vec<hmac::Tag>,
    /// All keys are one client.
    between_keys: bool,
}

/// The file of a cache folder that has its secret.
const SECRET: &str = "secret";
const SECRET_BYTES: usize = 32;

impl Sharing {
    /// # Errors
    /// [`io::Error`] when the system has no random numbers, or the secret of the cache folder `kept_in` can neither be
    /// read nor made.
    pub(crate) fn new(
        between_keys: bool,
        keys: &ApiKeys,
        kept_in: Option<&Path>,
    ) -> io::Result<Self> {
        let secret = match kept_in {
            Some(folder) => kept_secret(folder)?,
            None => random_secret()?,
        };
        let secret = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        let keys = keys.iter().map(|key| hmac::sign(&secret, key.as_bytes()));
        Ok(Self {
            keys: keys.collect(),
            secret,
            between_keys,
        })
    }

    /// Where a request of `client` with this `cache_salt` looks for computed prompts.
    pub(crate) fn namespace(&self, client: Client, salt: Option<&str>) -> Namespace {
        let key = client.0.filter(|_| !self.between_keys);
        if key.is_none() && salt.is_none() {
            return Namespace::COMMON;
        }
        // A flag and a length that does not vary first, so that no two pairs are written alike.
        let key = key.and_then(|key| self.keys.get(key as usize));
        let mut context = hmac::Context::with_key(&self.secret);
        context.update(&[u8::from(key.is_some())]);
        context.update(key.map_or(&[], |key| key.as_ref()));
        context.update(&[u8::from(salt.is_some())]);
        context.update(salt.unwrap_or("").as_bytes());
        let tag = context.sign();
        let bits = tag.as_ref().iter().take(16);
        Namespace::new(bits.fold(0, |bits, &byte| bits << 8 | u128::from(byte)))
    }
}

fn random_secret() -> io::Result<[u8; SECRET_BYTES]> {
    let mut secret = [0; SECRET_BYTES];
    let drawn = SystemRandom::new().fill(&mut secret);
    drawn.map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(secret)
}

/// The secret of a cache folder, made by whoever asks first.
fn kept_secret(folder: &Path) -> io::Result<[u8; SECRET_BYTES]> {
    let place = folder.join(SECRET);
    let read = || {
        fs::read(&place)
            .ok()
            .and_then(|bytes| bytes.try_into().ok())
    };
    if let Some(secret) = read() {
        return Ok(secret);
    }
    let part = folder.join(format!("{SECRET}.{}.part", std::process::id()));
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let made = random_secret()?;
    io::Write::write_all(&mut options.open(&part)?, &made)?;
    // A link does not replace what another server has made meanwhile; what has another length is none.
    let linked = fs::hard_link(&part, &place);
    let found = match linked {
        Ok(()) => Some(made),
        Err(_) => read(),
    };
    match found {
        Some(secret) => {
            fs::remove_file(&part)?;
            Ok(secret)
        }
        None => fs::rename(&part, &place).map(|()| made),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[&str]) -> ApiKeys {
        ApiKeys::new(keys.iter().copied()).expect("keys")
    }

    fn sharing(between_keys: bool) -> Sharing {
        let keys = keys(&["first-key", "second-key"]);
        Sharing::new(between_keys, &keys, None).expect("random numbers")
    }

    #[test]
    fn a_folder_keeps_who_a_key_is_whatever_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |keys: &ApiKeys, number, salt| {
            let sharing = Sharing::new(false, keys, Some(folder.path())).expect("a secret");
            sharing.namespace(Client(Some(number)), salt)
        };
        let before = keys(&["first-key", "second-key"]);
        let after = keys(&["another-key", "first-key"]);
        assert_eq!(of(&before, 0, None), of(&after, 1, None));
        assert_eq!(of(&before, 0, Some("a")), of(&after, 1, Some("a")));
        assert_ne!(of(&before, 0, None), of(&after, 0, None));
        assert_ne!(of(&before, 1, None), of(&after, 1, None));
        let files = fs::read_dir(folder.path()).expect("a folder");
        assert_eq!(files.count(), 1, "the secret and nothing half written");
        let first = of(&before, 0, None);
        fs::write(folder.path().join(SECRET), "cut").expect("a file");
        assert_ne!(of(&before, 0, None), first, "another secret");
    }

    const ONE: Client = Client(Some(0));
    const TWO: Client = Client(Some(1));
    const NOBODY: Client = Client(None);

    #[test]
    fn keys_and_salts_separate_and_nothing_else_does() {
        let sharing = sharing(false);
        let of = |client, salt| sharing.namespace(client, salt);
        let all = [
            of(NOBODY, None),
            of(NOBODY, Some("a")),
            of(ONE, None),
            of(ONE, Some("a")),
            of(ONE, Some("b")),
            of(TWO, None),
            of(TWO, Some("a")),
        ];
        for (index, namespace) in all.iter().enumerate() {
            assert!(!all[..index].contains(namespace), "{index}");
        }
        assert_eq!(of(ONE, Some("a")), of(ONE, Some("a")));
        assert_eq!(of(NOBODY, None), Namespace::COMMON);
        let restarted = super::tests::sharing(false);
        assert_ne!(restarted.namespace(ONE, None), of(ONE, None));
    }

    #[test]
    fn keys_that_share_are_still_separated_by_salt() {
        let sharing = sharing(true);
        let of = |client, salt| sharing.namespace(client, salt);
        assert_eq!(of(ONE, None), of(TWO, None));
        assert_eq!(of(ONE, Some("a")), of(TWO, Some("a")));
        assert_ne!(of(ONE, Some("a")), of(ONE, Some("b")));
        assert_ne!(of(ONE, Some("a")), of(ONE, None));
    }
}
