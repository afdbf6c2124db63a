//! Which processor this is, where makers' designs differ in what is fast and no instruction tells.

/// The family of a processor of AMD: 25 is Zen 3 and 4, 26 is Zen 5.
#[cfg(target_arch = "x86_64")]
fn amd_family() -> Option<u32> {
    use std::arch::x86_64::__cpuid;
    use std::sync::LazyLock;
    // Once, because virtual machines leave the guest to answer.
    static FAMILY: LazyLock<Option<u32>> = LazyLock::new(|| {
        let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        // Above 15 the family is a sum.
        let family = (version >> 8 & 15) + (version >> 20 & 255);
        (name.as_flattened() == b"AuthenticAMD").then_some(family)
    });
    *FAMILY
}

#[cfg(not(target_arch = "x86_64"))]
fn amd_family() -> Option<u32> {
    None
}

/// Whether `vdpbf16ps` multiplies faster than products in f32. Measured so on AMD's Zen 5, which multiplies twice as many;
/// Intel's processors multiply fewer.
pub(crate) fn multiplies_bf16_faster() -> bool {
    amd_family() >= Some(26)
}

/// Whether lines of several streams are better prefetched shortly before they are read. Measured so on AMD's Zen 4, where 1 KiB
/// ahead of eight or sixteen streams costs a tenth to a quarter of what memory gives. Those before it have first-level caches
/// of 32 KiB, too; Zen 5, with 48 KiB, and other makers' processors have not been measured with less than 1 KiB.
pub(crate) fn prefers_short_prefetches() -> bool {
    amd_family().is_some_and(|family| family < 26)
}
