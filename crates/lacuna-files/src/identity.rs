//! What is in a model's files, as a name that holds beyond the process.
//!
//! Reading all of a large model takes seconds, so what was found is remembered in small files of a folder, by what the
//! system says of a file: its device, number, length and the times it was changed. A file that is replaced or written
//! to is read again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::mapping::Mapping;
use crate::model::ModelFiles;

/// What files that remember are called.
pub const REMEMBERED: &str = "weights";

impl ModelFiles {
    /// A hash of every byte that the model's own tensors lie in: what it computes is the same with a head beside it. With a
    /// folder, what was found of a file is remembered there.
    ///
    /// # Errors
    /// When a file cannot be read. What cannot be remembered is no error.
    pub fn content(&self, folder: Option<&Path>) -> io::Result<[u8; 32]> {
        let mut all = blake3::Hasher::new_derive_key("lacuna weights");
        for mapping in self.own_mappings() {
            all.update(&content_of(mapping, folder)?);
        }
        Ok(*all.finalize().as_bytes())
    }

    /// 64 hexadecimal digits that tell these files from others without reading them: by how each is called, how long it
    /// is, and when it was written. The same files have the same in every process.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut all = blake3::Hasher::new_derive_key("lacuna model files");
        for mapping in self.own_mappings() {
            let name = mapping.path().and_then(Path::file_name);
            let name = name.unwrap_or_default().as_encoded_bytes();
            let since = modified(mapping).and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            all.update(&(name.len() as u64).to_le_bytes());
            all.update(name);
            all.update(&(mapping.len() as u64).to_le_bytes());
            all.update(&since.unwrap_or_default().as_nanos().to_le_bytes());
        }
        all.finalize().to_hex().to_string()
    }

    /// When the last of these files was written; `None` where they are none, such as the demo in the program.
    #[must_use]
    pub fn modified(&self) -> Option<SystemTime> {
        self.own_mappings().iter().filter_map(modified).max()
    }
}

fn modified(mapping: &Mapping) -> Option<SystemTime> {
    mapping.metadata().ok()??.modified().ok()
}

fn content_of(mapping: &Mapping, folder: Option<&Path>) -> io::Result<[u8; 32]> {
    let place = match (folder, identity(mapping)?) {
        (Some(folder), Some(identity)) => Some(place_of(folder, &identity)),
        _ => None,
    };
    if let Some(known) = place.as_deref().and_then(remembered) {
        return Ok(known);
    }
    let found = read(mapping)?;
    if let Some(place) = place {
        // The next start reads the file again.
        remember(&place, &found).ok();
    }
    Ok(found)
}

fn read(mapping: &Mapping) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; 1 << 20];
    for start in (0..mapping.len()).step_by(piece.len()) {
        let length = piece.len().min(mapping.len() - start);
        mapping.read_at(start, &mut piece[..length])?;
        hasher.update(&piece[..length]);
    }
    Ok(*hasher.finalize().as_bytes())
}

/// What tells a file from what it was before; `None` where nothing does.
#[cfg(unix)]
fn identity(mapping: &Mapping) -> io::Result<Option<Vec<u8>>> {
    use std::os::unix::fs::MetadataExt;
    let Some(metadata) = mapping.metadata()? else {
        return Ok(None);
    };
    let times = [
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    ];
    let numbers = [metadata.dev(), metadata.ino(), metadata.len()];
    let numbers = numbers.into_iter().flat_map(u64::to_le_bytes);
    let times = times.into_iter().flat_map(i64::to_le_bytes);
    Ok(Some(numbers.chain(times).collect()))
}

#[cfg(not(unix))]
fn identity(_: &Mapping) -> io::Result<Option<Vec<u8>>> {
    Ok(None)
}

fn place_of(folder: &Path, identity: &[u8]) -> PathBuf {
    let name = blake3::hash(identity).to_hex();
    folder.join(format!("{}.{REMEMBERED}", &name[..32]))
}

fn remembered(place: &Path) -> Option<[u8; 32]> {
    let text = std::fs::read_to_string(place).ok()?;
    let hash = blake3::Hash::from_hex(text.trim()).ok()?;
    Some(*hash.as_bytes())
}

fn remember(place: &Path, found: &[u8; 32]) -> io::Result<()> {
    let part = place.with_extension(format!("{}.part", std::process::id()));
    let text = blake3::Hash::from_bytes(*found).to_hex();
    std::fs::write(&part, text.as_bytes())?;
    std::fs::rename(&part, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(path: &Path, bytes: &[u8]) -> Mapping {
        std::fs::write(path, bytes).expect("a file");
        Mapping::open(path).expect("a mapping")
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed_and_not_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let remembers = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("weights.bin");
        let of = |mapping: &Mapping| content_of(mapping, Some(remembers.path())).expect("read");
        let bytes = vec![7; (1 << 20) + 5];
        let one = mapped(&path, &bytes);
        let first = of(&one);
        assert_eq!(first, *blake3::hash(&bytes).as_bytes());
        let kept = std::fs::read_dir(remembers.path()).expect("a folder");
        let kept: Vec<_> = kept.map(|entry| entry.expect("a file").path()).collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
        let other = blake3::hash(b"as if").to_hex();
        std::fs::write(&kept[0], other.as_bytes()).expect("a file");
        assert_eq!(of(&one), *blake3::hash(b"as if").as_bytes(), "remembered");
        std::fs::remove_file(&path).expect("a file");
        let changed = mapped(&path, &vec![8; (1 << 20) + 5]);
        assert_ne!(of(&changed), first);
        let memory = Mapping::from(vec![1, 2, 3]);
        assert_eq!(of(&memory), *blake3::hash(&[1, 2, 3]).as_bytes());
        std::fs::write(&kept[0], "no hash").expect("a file");
        assert_eq!(of(&one), first, "read again");
    }

    #[test]
    fn a_digest_is_of_what_the_system_says_of_a_file() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/llama3/model.gguf");
        let bytes = std::fs::read(demo).expect("committed");
        let folder = tempfile::tempdir().expect("a folder");
        let written = |name: &str, seconds: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, &bytes).expect("a file");
            let at = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            let file = std::fs::File::options().write(true).open(&path);
            file.expect("a file").set_modified(at).expect("a time");
            let files = ModelFiles::open(&path).expect("a model");
            assert_eq!(files.modified(), Some(at));
            files.digest()
        };
        let first = written("a.gguf", 1000);
        assert!(first.len() == 64 && first.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_eq!(written("a.gguf", 1000), first);
        assert_ne!(written("a.gguf", 2000), first);
        assert_ne!(written("b.gguf", 1000), first);
    }
}
