//! Segments that only the owner of a key can read or change.
//!
//! Each file has a key of its own, derived (BLAKE3) from the folder's and 32 random bytes at its start; its header and
//! each piece of its payload are sealed with AES-256-GCM under that, by their number: 0, then 1, 2, ... So no number is
//! used twice with one key, however many files and processes there are. The header holds the tags of all pieces, so none
//! can be exchanged, left out or taken from another file.
//!
//! What names of files say of tokens is derived from the key, too: whoever has not got it can see sizes and times, and
//! which files follow each other, but cannot find out whether a text that they guess was said.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

/// Random bytes at the start of each file.
pub(super) const SALT_BYTES: usize = 32;
const KEY_BYTES: usize = 32;

/// What a cache folder is encrypted with. Clones are the same key.
#[derive(Clone)]
pub struct CacheKey(Arc<[u8; KEY_BYTES]>);

/// Why a file is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It cannot be read.
    #[error("the key `{}` cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Others than its owner could have read it.
    #[error("the key `{}` can be read by others; `chmod 600` it, and make another if they may have", path.display())]
    Open {
        /// The file.
        path: PathBuf,
    },
    /// It is something else.
    #[error(
        "`{}` is no key: that is 32 random bytes, or 64 hexadecimal digits of them; `openssl rand -out FILE 32` makes one",
        path.display()
    )]
    Form {
        /// The file.
        path: PathBuf,
    },
}

impl CacheKey {
    /// The key of these bytes, which must be random.
    #[must_use]
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Arc::new(bytes))
    }

    /// The key in the file at `path`: 32 bytes, or 64 hexadecimal digits and perhaps the end of a line.
    ///
    /// # Errors
    /// [`KeyError`], also when others than its owner may read the file.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        use std::io::Read;
        let path_of = || path.to_owned();
        let io = |source| KeyError::Io {
            path: path_of(),
            source,
        };
        let file = std::fs::File::open(path).map_err(io)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            if file.metadata().map_err(io)?.mode() & 0o077 != 0 {
                return Err(KeyError::Open { path: path_of() });
            }
        }
        let mut bytes = Vec::new();
        file.take(128).read_to_end(&mut bytes).map_err(io)?;
        let key = <[u8; KEY_BYTES]>::try_from(bytes.as_slice()).ok();
        let key = key.or_else(|| {
            blake3::Hash::from_hex(bytes.trim_ascii())
                .ok()
                .map(Into::into)
        });
        key.map(Self::new)
            .ok_or_else(|| KeyError::Form { path: path_of() })
    }

    /// What it is called where everybody can read it. Nothing follows from it.
    #[must_use]
    pub fn id(&self) -> String {
        let id = self.derive("lacuna KV cache key id", &[]);
        blake3::Hash::from_bytes(id).to_hex()[..32].to_owned()
    }

    /// What names of files are derived from beside their tokens.
    pub(super) fn of_names(&self) -> [u8; 32] {
        self.derive("lacuna KV cache names", &[])
    }

    /// For a file that begins with `salt`.
    pub(super) fn of_file(&self, salt: [u8; SALT_BYTES]) -> FileCipher {
        let key = self.derive("lacuna KV cache file", &salt);
        let key = UnboundKey::new(&AES_256_GCM, &key);
        FileCipher {
            salt,
            key: LessSafeKey::new(key.expect("the key has the length of such keys")),
        }
    }

    /// For a new file.
    pub(super) fn of_new_file(&self) -> io::Result<FileCipher> {
        let mut salt = [0; SALT_BYTES];
        let drawn = SystemRandom::new().fill(&mut salt);
        drawn.map_err(|_| io::Error::other("the system has no random numbers"))?;
        Ok(self.of_file(salt))
    }

    fn derive(&self, purpose: &str, salt: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        hasher.update(&self.0[..]).update(salt);
        *hasher.finalize().as_bytes()
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheKey({})", self.id())
    }
}

impl PartialEq for CacheKey {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for CacheKey {}

/// Seals and opens the parts of one file.
pub(super) struct FileCipher {
    pub(super) salt: [u8; SALT_BYTES],
    key: LessSafeKey,
}

impl fmt::Debug for FileCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileCipher")
    }
}

impl PartialEq for FileCipher {
    fn eq(&self, other: &Self) -> bool {
        self.salt == other.salt
    }
}

impl Eq for FileCipher {}

impl FileCipher {
    /// Encrypts part `number` in its place, and returns what tells whether it and `bound` are what they were. Each
    /// number is used once for a file.
    pub(super) fn seal(&self, number: u64, bound: &[u8], bytes: &mut [u8]) -> u128 {
        let nonce = nonce(number);
        let sealed = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(bound), bytes);
        let tag = sealed.expect("parts are shorter than the cipher can take");
        let mut bytes = [0; 16];
        bytes.copy_from_slice(tag.as_ref());
        u128::from_le_bytes(bytes)
    }

    /// Decrypts part `number` in its place; `false` when it or `bound` is not what was sealed.
    pub(super) fn open(&self, number: u64, bound: &[u8], bytes: &mut [u8], tag: u128) -> bool {
        let tag = Tag::from(tag.to_le_bytes());
        let opened =
            self.key
                .open_in_place_separate_tag(nonce(number), Aad::from(bound), tag, bytes, 0..);
        opened.is_ok()
    }
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_opens_with_its_key_its_number_and_what_it_is_bound_to() {
        let key = CacheKey::new([7; 32]);
        let cipher = key.of_file([1; SALT_BYTES]);
        let mut bytes = *b"what was said";
        let tag = cipher.seal(3, b"header", &mut bytes);
        assert_ne!(&bytes, b"what was said");
        let opens = |cipher: &FileCipher, number, bound: &[u8], tag| {
            let mut bytes = bytes;
            cipher.open(number, bound, &mut bytes, tag).then_some(bytes)
        };
        assert_eq!(opens(&cipher, 3, b"header", tag), Some(*b"what was said"));
        assert_eq!(opens(&cipher, 4, b"header", tag), None);
        assert_eq!(opens(&cipher, 3, b"another", tag), None);
        assert_eq!(opens(&cipher, 3, b"header", tag ^ 1), None);
        for other in [
            key.of_file([2; SALT_BYTES]),
            CacheKey::new([8; 32]).of_file([1; SALT_BYTES]),
        ] {
            assert_eq!(opens(&other, 3, b"header", tag), None);
        }
        // Whoever has not got the key cannot work names of files out.
        let other = CacheKey::new([8; 32]);
        assert!(key != other && key == key.clone());
        assert_ne!(key.of_names(), other.of_names());
        assert_ne!(key.of_names(), CacheKey::new([0; 32]).of_names());
        assert_ne!(cipher, key.of_file([2; SALT_BYTES]));
        assert_eq!(cipher, key.of_file([1; SALT_BYTES]));
        let (one, two) = (key.of_new_file(), key.of_new_file());
        assert_ne!(one.expect("random").salt, two.expect("random").salt);
        assert!(!format!("{key:?} {cipher:?}").contains("7, 7"));
    }

    #[cfg(unix)]
    #[test]
    fn a_key_is_a_file_of_its_owner_alone_with_just_as_many_bytes() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let read = |bytes: &[u8], mode: u32| {
            std::fs::write(&path, bytes).expect("room");
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("a mode");
            CacheKey::read(&path)
        };
        let key = CacheKey::new([0xab; 32]);
        assert_eq!(read(&[0xab; 32], 0o600).expect("a key"), key);
        assert_eq!(
            read(format!("{}\n", "ab".repeat(32)).as_bytes(), 0o400).expect("a key"),
            key
        );
        for bytes in [&[0xab; 31][..], &[0xab; 33], b"", &[b'g'; 64], &[b'a'; 66]] {
            assert!(
                matches!(read(bytes, 0o600), Err(KeyError::Form { .. })),
                "{bytes:?}"
            );
        }
        for mode in [0o640, 0o604, 0o660] {
            assert!(matches!(
                read(&[0xab; 32], mode),
                Err(KeyError::Open { .. })
            ));
        }
        let absent = CacheKey::read(&folder.path().join("absent"));
        assert!(matches!(absent, Err(KeyError::Io { .. })));
    }
}
