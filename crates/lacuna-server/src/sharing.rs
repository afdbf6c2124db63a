//! Which requests share computed prompts.
//!
//! What one API key has asked is none of another's business, yet `cached_tokens` and the time to the
//! first token would tell. So the prefix cache is separated by key, and within a key by the request's
//! `cache_salt`, as other servers have it.

use lacuna_kv::prefix::Namespace;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// Who sent a request: which of the keys was presented, or nobody in particular without keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Client(pub(crate) Option<u32>);

/// Derives namespaces of the prefix cache.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// Of this process alone, so that nobody can look for salts whose namespaces collide.
    secret: hmac::Key,
    /// All keys are one client.
    between_keys: bool,
}

impl Sharing {
    /// # Errors
    /// [`std::io::Error`] when the system has no random numbers.
    pub(crate) fn new(between_keys: bool) -> std::io::Result<Self> {
        let mut secret = [0; 32];
        let drawn = SystemRandom::new().fill(&mut secret);
        drawn.map_err(|_| std::io::Error::other("the system has no random numbers"))?;
        Ok(Self {
            secret: hmac::Key::new(hmac::HMAC_SHA256, &secret),
            between_keys,
        })
    }

    /// Where a request of `client` with this `cache_salt` looks for computed prompts.
    pub(crate) fn namespace(&self, client: Client, salt: Option<&str>) -> Namespace {
        let key = client.0.filter(|_| !self.between_keys);
        if key.is_none() && salt.is_none() {
            return Namespace::COMMON;
        }
        // Lengths that do not vary first, so that no two pairs are written alike.
        let key = key.map_or([0; 5], |key| {
            let [a, b, c, d] = key.to_be_bytes();
            [1, a, b, c, d]
        });
        let mut context = hmac::Context::with_key(&self.secret);
        context.update(&key);
        context.update(&[u8::from(salt.is_some())]);
        context.update(salt.unwrap_or("").as_bytes());
        let tag = context.sign();
        let bits = tag.as_ref().iter().take(16);
        Namespace::new(bits.fold(0, |bits, &byte| bits << 8 | u128::from(byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Client = Client(Some(0));
    const TWO: Client = Client(Some(1));
    const NOBODY: Client = Client(None);

    #[test]
    fn keys_and_salts_separate_and_nothing_else_does() {
        let sharing = Sharing::new(false).expect("random numbers");
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
        let restarted = Sharing::new(false).expect("random numbers");
        assert_ne!(restarted.namespace(ONE, None), of(ONE, None));
    }

    #[test]
    fn keys_that_share_are_still_separated_by_salt() {
        let sharing = Sharing::new(true).expect("random numbers");
        let of = |client, salt| sharing.namespace(client, salt);
        assert_eq!(of(ONE, None), of(TWO, None));
        assert_eq!(of(ONE, Some("a")), of(TWO, Some("a")));
        assert_ne!(of(ONE, Some("a")), of(ONE, Some("b")));
        assert_ne!(of(ONE, Some("a")), of(ONE, None));
    }
}
