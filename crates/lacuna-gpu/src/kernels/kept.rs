//! The file in which what a driver has made of kernels outlives the process.
//!
//! ```text
//! "LACUNAKN"  vendor device driver-version (u32, little-endian)  driver's build (16)  what it compiles for (16)
//! BLAKE3 of all of that and of the rest (32)  what the driver gave
//! ```
//!
//! A file that is damaged, of another device or of another driver, is as good as none, and is written anew. It is written under
//! another name and renamed, so there is never half of one.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::{Compute, DriverIdentity};

const MAGIC: [u8; 8] = *b"LACUNAKN";
const IDENTITY_BYTES: usize = MAGIC.len() + 3 * 4 + 2 * 16;
const HEADER_BYTES: usize = IDENTITY_BYTES + blake3::OUT_LEN;
/// More than the kernels of any model come to: some hundred of some hundred kilobytes each.
const MOST_BYTES: u64 = 64 << 20;

/// A file of kernels of one device.
#[derive(Debug)]
pub(crate) struct KeptKernels {
    path: PathBuf,
    identity: DriverIdentity,
    /// What was in it.
    before: Vec<u8>,
}

impl KeptKernels {
    /// Has `compute` look kernels up in the file in `folder` that the device of this identity has, as far as that is of use.
    ///
    /// # Errors
    /// What the driver refuses.
    pub(crate) fn open(
        folder: &Path,
        identity: DriverIdentity,
        compute: &mut Compute,
    ) -> Result<Self, DeviceError> {
        let DriverIdentity { vendor, device, .. } = identity;
        let path = folder.join(format!("{vendor:08x}-{device:08x}.kernels"));
        let before = read(&path, &identity).unwrap_or_default();
        // SAFETY: P1 of the device by K2.
        let cache = unsafe { compute.queue().kernel_cache(&before)? };
        compute.keep_kernels_in(cache)?;
        Ok(Self {
            path,
            identity,
            before,
        })
    }

    /// Writes what `compute` has now, if that is more than there was. A folder that cannot be written to costs the time to
    /// compile the next time, and nothing else.
    pub(crate) fn keep(&self, compute: &Compute) {
        let bytes = compute.kernel_cache().and_then(|cache| cache.bytes().ok());
        let Some(bytes) = bytes.filter(|bytes| *bytes != self.before) else {
            return;
        };
        write(&self.path, &self.identity, &bytes).ok();
    }
}

/// What the file is for.
fn header(identity: &DriverIdentity) -> Vec<u8> {
    let DriverIdentity {
        vendor,
        device,
        driver_version,
        driver,
        kernels,
    } = identity;
    let numbers = [vendor, device, driver_version].map(|number| number.to_le_bytes());
    [&MAGIC[..], numbers.as_flattened(), driver, kernels].concat()
}

fn hash(header: &[u8], bytes: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(header).update(bytes);
    hasher.finalize()
}

/// What the driver of this identity gave, if the file is whole and of it.
fn read(path: &Path, identity: &DriverIdentity) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let (found, rest) = bytes.split_at_checked(IDENTITY_BYTES)?;
    let (wanted, rest) = rest.split_at_checked(blake3::OUT_LEN)?;
    let whole = found == header(identity) && wanted == hash(found, rest).as_bytes();
    whole.then(|| rest.to_vec())
}

fn write(path: &Path, identity: &DriverIdentity, bytes: &[u8]) -> io::Result<()> {
    let fits = (HEADER_BYTES + bytes.len()) as u64 <= MOST_BYTES;
    if !fits {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    if let Some(folder) = path.parent() {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(folder)?;
    }
    let header = header(identity);
    // Two processes may write at once.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(&header)?;
        file.write_all(hash(&header, bytes).as_bytes())?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)
    });
    if written.is_err() {
        fs::remove_file(&part).ok();
    }
    written
}

#[cfg(test)]
mod tests {
    use lacuna_pages::VulkanDevice;

    use super::super::{Kernels, Wanted};
    use super::*;

    fn identity() -> DriverIdentity {
        DriverIdentity {
            vendor: 0x10de,
            device: 0x2330,
            driver_version: 7,
            driver: [3; 16],
            kernels: [5; 16],
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_not_if_any_of_it_has_changed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("some/where.kernels");
        assert_eq!(read(&path, &identity()), None);
        write(&path, &identity(), b"what a driver gave").expect("room");
        assert_eq!(
            read(&path, &identity()).as_deref(),
            Some(&b"what a driver gave"[..])
        );
        let good = fs::read(&path).expect("it is there");
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            fs::write(&path, bytes).expect("room");
            assert_eq!(read(&path, &identity()), None, "byte {at}");
            fs::write(&path, &good[..at]).expect("room");
            assert_eq!(read(&path, &identity()), None, "{at} bytes");
        }
        fs::write(&path, [&good[..], b"!"].concat()).expect("room");
        assert_eq!(read(&path, &identity()), None, "more than was written");
        let left = fs::read_dir(path.parent().expect("a folder")).expect("it is there");
        assert_eq!(left.count(), 1, "no part of a file is left");
    }

    #[test]
    fn a_file_of_another_device_or_driver_is_as_good_as_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kernels");
        write(&path, &identity(), b"what a driver gave").expect("room");
        let changes: [fn(&mut DriverIdentity); 5] = [
            |other| other.vendor += 1,
            |other| other.device += 1,
            |other| other.driver_version += 1,
            |other| other.driver[15] += 1,
            |other| other.kernels[0] += 1,
        ];
        for change in changes {
            let mut other = identity();
            change(&mut other);
            assert_eq!(read(&path, &other), None, "{other:?}");
        }
    }

    #[test]
    #[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
    fn a_good_file_is_begun_with_and_a_damaged_one_written_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let device = VulkanDevice::open().expect("a device");
        let identity = device.driver_identity();
        let compile = || {
            let mut compute = device.queue().compute(4, 4).expect("a few bytes");
            let kept = KeptKernels::open(folder.path(), identity, &mut compute);
            let kept = kept.expect("the driver takes it");
            Kernels::new(&compute, &Wanted::default(), false).expect("it compiles them");
            kept.keep(&compute);
            kept
        };
        let first = compile();
        assert_eq!(first.before, b"");
        let written = read(&first.path, &identity).expect("a whole file");
        assert!(!written.is_empty());
        assert_eq!(compile().before, written);
        let mut damaged = fs::read(&first.path).expect("it is there");
        *damaged.last_mut().expect("some bytes") ^= 1;
        fs::write(&first.path, &damaged).expect("room");
        assert_eq!(compile().before, b"", "it is ignored");
        assert!(read(&first.path, &identity).is_some(), "and whole again");
    }
}
