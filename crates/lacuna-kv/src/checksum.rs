//! Checksums of what is in files: XXH3 with 128 bits. They tell accidents, not forgeries.

use twox_hash::XxHash3_128;

/// The checksum of `bytes`.
pub(crate) fn xxh3_128(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// The same of bytes that come one after the other.
#[derive(Default)]
pub(crate) struct Checksum(XxHash3_128);

impl Checksum {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(crate) fn finish(&self) -> u128 {
        self.0.finish_128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of earlier versions are read by their checksums. From the test vectors of the reference implementation:
    /// nothing, and one byte.
    #[test]
    fn checksums_are_those_of_the_reference_and_the_same_in_parts() {
        assert_eq!(xxh3_128(&[]), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        let bytes: Vec<u8> = (0..5000u32).map(|index| (index * 31) as u8).collect();
        for length in [0, 1, 16, 17, 128, 129, 240, 241, 1024, 5000] {
            for part in [1, 7, 64, 1000] {
                let mut checksum = Checksum::default();
                bytes[..length]
                    .chunks(part)
                    .for_each(|bytes| checksum.update(bytes));
                assert_eq!(
                    checksum.finish(),
                    xxh3_128(&bytes[..length]),
                    "{length} by {part}"
                );
            }
        }
    }
}
