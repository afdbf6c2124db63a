//! The host device: pages of memfd heaps attached to reserved address space by the CPU's own page
//! table. Linux only; elsewhere [`HostDevice::new`] is a typed error and the dense device serves.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub use linux::HostDevice;

#[cfg(not(target_os = "linux"))]
mod elsewhere;
#[cfg(not(target_os = "linux"))]
pub use elsewhere::HostDevice;

/// How much of the system the host device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Which part of `vm.max_map_count`, in percent, pages may take. The limit is the process's:
    /// thread stacks, libraries and mapped model files need some of it too. Default 50, from 1 to
    /// 95.
    pub mapping_share_percent: u8,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            mapping_share_percent: 50,
        }
    }
}
