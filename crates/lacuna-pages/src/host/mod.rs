//! The host device: pages of heaps attached to reserved address space by the CPU's own page table. Heaps
//! are memfds on Linux and Android, and memory objects of the Mach kernel on macOS, with the feature `macos`,
//! which nobody has run yet; elsewhere [`HostDevice::new`] is a typed error and the dense device serves.

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub use linux::HostDevice;

#[cfg(all(feature = "macos", target_os = "macos"))]
mod macos;
#[cfg(all(feature = "macos", target_os = "macos"))]
pub use macos::HostDevice;

#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    all(feature = "macos", target_os = "macos")
)))]
mod elsewhere;
#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    all(feature = "macos", target_os = "macos")
)))]
pub use elsewhere::HostDevice;

/// How much of the system the host device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Which part of `vm.max_map_count`, in percent, pages may take. The limit is the process's:
    /// thread stacks, libraries and mapped model files need some of it too. Default 50, from 1 to
    /// 95. macOS has no such limit.
    pub mapping_share_percent: u8,
    /// Whether long mappings are moved into the system's huge pages. Default never, and refused on macOS.
    pub huge_pages: HugePages,
}

/// What becomes of mappings of 2 MiB and more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// They stay in base pages.
    #[default]
    Never,
    /// Each whole 2 MiB of a mapping whose address and heap offset agree (always, with pages of
    /// 2 MiB) is moved into a huge page as it is mapped: about 5 % more reading speed for a copy of
    /// 2 MiB each. What the system does not move stays as it is.
    Collapse,
}

impl HostConfig {
    /// The default settings, as a constant.
    pub const DEFAULT: Self = Self {
        mapping_share_percent: 50,
        huge_pages: HugePages::Never,
    };
}

impl Default for HostConfig {
    fn default() -> Self {
        Self::DEFAULT
    }
}
