//! Names that hold beyond the process: of everything that shapes a byte of KV, and of the tokens it was computed
//! from.

use std::fmt;

use super::cipher::CacheKey;
use crate::prefix::Namespace;

/// The part of a fingerprint that names the key.
const KEY: &str = "encryption key";

/// Everything that shapes a byte of the KV cache: bytes that were computed under another are of no use.
///
/// Its parts have names, so that it can be said which of them differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    parts: Vec<(String, String)>,
    digest: [u8; 32],
    /// Of who has a key, and no part of what is told.
    secret: Option<Secret>,
}

/// Bytes that are shown to nobody.
#[derive(Clone, PartialEq, Eq)]
struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Fingerprint {
    /// The fingerprint of these parts, a name and a value each, in this order.
    pub fn new<N: Into<String>>(parts: impl IntoIterator<Item = (N, String)>) -> Self {
        let parts = parts.into_iter();
        let parts: Vec<(String, String)> =
            parts.map(|(name, value)| (name.into(), value)).collect();
        let mut hasher = blake3::Hasher::new_derive_key("lacuna KV fingerprint");
        for text in parts.iter().flat_map(|(name, value)| [name, value]) {
            // Lengths first, so that no two lists are written alike.
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        Self {
            digest: *hasher.finalize().as_bytes(),
            parts,
            secret: None,
        }
    }

    /// The same, of files that take `key` to be read: what tokens hash to then follows from it, too.
    pub(crate) fn with_key(self, key: &CacheKey) -> Self {
        let keyed = self.and([(KEY, key.id())]);
        Self {
            secret: Some(Secret(key.of_names())),
            ..keyed
        }
    }

    /// The same, with more parts.
    pub(crate) fn and(self, more: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let more = more.into_iter();
        let more = more.map(|(name, value)| (name.to_owned(), value));
        Self::new(self.parts.into_iter().chain(more))
    }

    pub(crate) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// What a folder of segments that were computed under it is called.
    pub(crate) fn folder_name(&self) -> String {
        hex(&self.digest[..16])
    }

    /// Its parts, a line each, for [`differing`](Self::differing).
    pub(crate) fn to_text(&self) -> String {
        let line = |(name, value): &(String, String)| format!("{name} = {value}\n");
        self.parts.iter().map(line).collect()
    }

    /// The names of the parts that are others in `text`.
    pub(crate) fn differing(&self, text: &str) -> Vec<String> {
        let of = |name: &str| {
            let lines = text.lines().filter_map(|line| line.split_once(" = "));
            let mut same = lines.filter(|(other, _)| *other == name);
            same.next().map(|(_, value)| value)
        };
        let differs = |(name, value): &&(String, String)| of(name) != Some(value);
        let parts = self.parts.iter().filter(differs);
        let mut names: Vec<String> = parts.map(|(name, _)| name.clone()).collect();
        let is_keyed = self.secret.is_some();
        if of(KEY).is_some() && !is_keyed {
            names.push(KEY.to_owned());
        }
        names
    }

    /// The name of the key that files were encrypted with which were computed as `text` says.
    pub(crate) fn key_of(text: &str) -> Option<&str> {
        let lines = text.lines().filter_map(|line| line.split_once(" = "));
        let mut keys = lines.filter(|(name, _)| *name == KEY);
        keys.next().map(|(_, id)| id)
    }
}

/// What all tokens up to the end of a group hash to, under one fingerprint and in one namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Chain(pub(crate) [u8; 32]);

impl Chain {
    /// Before the first token.
    pub(crate) fn root(fingerprint: &Fingerprint, namespace: Namespace) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("lacuna KV chain");
        hasher.update(&fingerprint.digest);
        hasher.update(&namespace.bits().to_le_bytes());
        if let Some(Secret(secret)) = &fingerprint.secret {
            hasher.update(secret);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// After `tokens`, which follow.
    pub(crate) fn after(self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The start of it, for names of files.
    pub(crate) fn short(self) -> String {
        hex(&self.0[..16])
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(parts: &[(&str, &str)]) -> Fingerprint {
        let parts = parts.iter();
        Fingerprint::new(parts.map(|&(name, value)| (name, value.to_owned())))
    }

    #[test]
    fn every_part_counts_and_is_named_when_it_differs() {
        let one = fingerprint(&[("weights", "a"), ("kv type", "f16")]);
        let others = [
            fingerprint(&[("weights", "a"), ("kv type", "q8_0")]),
            fingerprint(&[("weights", "b"), ("kv type", "f16")]),
            fingerprint(&[("weights", "ak"), ("v type", "f16")]),
            fingerprint(&[("weights", "a")]),
        ];
        for other in &others {
            assert_ne!(one.digest(), other.digest(), "{other:?}");
            assert_ne!(one.folder_name(), other.folder_name());
        }
        assert_eq!(one.differing(&others[0].to_text()), ["kv type"]);
        assert_eq!(one.differing(&others[1].to_text()), ["weights"]);
        assert_eq!(one.differing(&others[3].to_text()), ["kv type"]);
        assert!(one.differing(&one.to_text()).is_empty());
        let more = fingerprint(&[("weights", "a")]).and([("kv type", "f16".to_owned())]);
        assert_eq!(more, one);
    }

    #[test]
    fn chains_are_of_their_tokens_namespace_and_fingerprint() {
        let (one, two) = (
            fingerprint(&[("weights", "a")]),
            fingerprint(&[("weights", "b")]),
        );
        // What is told of it, but not the key.
        let id = CacheKey::new([7; 32]).id();
        let keyed = fingerprint(&[("weights", "a")]).with_key(&CacheKey::new([7; 32]));
        let told = fingerprint(&[("weights", "a"), (KEY, &id)]);
        assert_eq!(keyed.digest(), told.digest());
        let (root, guess) = [&keyed, &told]
            .map(|it| Chain::root(it, Namespace::COMMON))
            .into();
        assert_ne!(root, guess);
        assert_eq!(
            (
                one.differing(&keyed.to_text()),
                keyed.differing(&one.to_text())
            ),
            (vec![KEY.to_owned()], vec![KEY.to_owned()])
        );
        let root = Chain::root(&one, Namespace::COMMON);
        let after = root.after(&[1, 2]).after(&[3, 4]);
        assert_eq!(
            after,
            Chain::root(&one, Namespace::COMMON)
                .after(&[1, 2])
                .after(&[3, 4])
        );
        for other in [
            root.after(&[1, 2]).after(&[3, 5]),
            root.after(&[1, 2, 3, 4]),
            Chain::root(&two, Namespace::COMMON)
                .after(&[1, 2])
                .after(&[3, 4]),
            Chain::root(&keyed, Namespace::COMMON)
                .after(&[1, 2])
                .after(&[3, 4]),
            Chain::root(&one, Namespace::new(1))
                .after(&[1, 2])
                .after(&[3, 4]),
        ] {
            assert_ne!(after, other);
        }
    }
}
