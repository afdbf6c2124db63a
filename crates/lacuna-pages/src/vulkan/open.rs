#![expect(unsafe_code, reason = "the Vulkan loader is a foreign library")]

//! Finding a driver and opening it.
//!
//! A process has one instance, which is never destroyed: with the last instance of a process the loader unloads the
//! driver, and drivers do not survive that for long. What threads have of it is pulled from under those that still
//! run, and room for such things, of which a process has only so much, is lost with each time it is loaded.
//!
//! # Safety
//!
//! * **O1** The loader and the drivers it finds are the system's; loading them runs their code, as
//!   every Vulkan program does.
//! * **O2** An instance that was created is never destroyed, and its loader stays loaded.

use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use ash::{Entry, Instance, vk};

use super::NAME;
use super::table::{LEAST_HEAP_SLOTS, heap_slots};
use crate::device::DeviceError;

/// What a physical device has, as far as sparse buffers are concerned.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) name: String,
    pub(super) kind: vk::PhysicalDeviceType,
    pub(super) api_version: u32,
    pub(super) sparse_binding: bool,
    pub(super) sparse_residency_buffer: bool,
    pub(super) sparse_residency_aliased: bool,
    /// Whether kernels may choose among the buffers of an array, each thread its own.
    pub(super) arrays_of_buffers: bool,
    pub(super) timeline_semaphore: bool,
    /// What each queue family can do.
    pub(super) families: Vec<vk::QueueFlags>,
    pub(super) limits: Limits,
    pub(super) identity: DriverIdentity,
    /// Whether it says how much of its memory a process may have: `VK_EXT_memory_budget`.
    pub(super) has_budget: bool,
}

/// Whose kernels are compiled: those of one device and driver are no use to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverIdentity {
    /// The maker's number.
    pub vendor: u32,
    /// The number of the model among the maker's.
    pub device: u32,
    /// The driver's version, as its maker counts.
    pub driver_version: u32,
    /// The build of the driver.
    pub driver: [u8; 16],
    /// What kernels are compiled for by it.
    pub kernels: [u8; 16],
}

/// The bounds within which a device works, in bytes where not said otherwise.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    /// All reservations together.
    pub(super) address_space: u64,
    /// One buffer.
    pub(super) buffer: u64,
    /// One allocation of device memory.
    pub(super) allocation: u64,
    /// What a shader sees of a buffer at once.
    pub(super) window: u64,
    /// What such a window's start is a multiple of.
    pub(super) window_alignment: u64,
    /// Whether holes read as zeros and lose what is written to them.
    pub(super) strict_holes: bool,
    /// The most threads of a workgroup.
    pub(super) group_threads: u32,
    /// The most bytes that such threads share.
    pub(super) shared_bytes: u32,
    /// A tick of the clock that passes are timed by; 0 where there is none.
    pub(super) tick_nanoseconds: f64,
    /// Whether kernels may add up products of packed bytes by one instruction.
    pub(super) integer_dot: bool,
    /// And whether the device is faster for it.
    pub(super) fast_integer_dot: bool,
    /// Storage buffers that a kernel may be shown.
    pub(super) storage_buffers: u32,
}

/// How the pages of a reservation are found. A device that has less is used with what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageTable {
    /// Not at all: every reservation is memory from its first to its last byte, as on a
    /// [`DenseDevice`](crate::DenseDevice).
    Unused,
    /// In a table in device memory, where kernels look them up: a block table. Pages may be in several places.
    Lookup,
    /// By the device's own page table, in sparse buffers. Pages may be in several places.
    #[default]
    Device,
}

impl PageTable {
    /// All ways, the least first.
    pub const ALL: [Self; 3] = [Self::Unused, Self::Lookup, Self::Device];

    /// The name that settings take.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unused => "unused",
            Self::Lookup => "lookup",
            Self::Device => "device",
        }
    }
}

/// The queue families a device is used through; often one and the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Families {
    pub(super) compute: u32,
    pub(super) bind: u32,
}

/// An open instance: there for as long as the process is.
pub(super) struct OpenInstance {
    pub(super) instance: Instance,
    /// The loaded library: stays loaded as long as anything of it is used.
    _entry: Entry,
}

impl OpenInstance {
    /// The instance that all devices of this process share, made at first use. What went wrong then is not
    /// remembered: who asks again may find a driver.
    pub(super) fn shared() -> Result<&'static Self, DeviceError> {
        static SHARED: Mutex<Option<&'static OpenInstance>> = Mutex::new(None);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        match *shared {
            Some(instance) => Ok(instance),
            None => Ok(shared.insert(Self::load(None)?)),
        }
    }

    /// Makes an instance with the system's loader, or with `library` instead.
    fn load(library: Option<&str>) -> Result<&'static Self, DeviceError> {
        let entry = match library {
            // SAFETY: O1.
            Some(library) => unsafe { Entry::load_from(library) },
            // SAFETY: O1.
            None => unsafe { Entry::load() },
        }
        .map_err(|error| unavailable(format!("no Vulkan loader ({error})")))?;
        let application = vk::ApplicationInfo::default()
            .application_name(c"lacuna")
            .api_version(vk::API_VERSION_1_3);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: O1; `info` and what it points to outlive the call.
        let instance = unsafe { entry.create_instance(&info, None) }
            .map_err(|result| unavailable(format!("no Vulkan driver ({result})")))?;
        // Leaked for O2.
        Ok(Box::leak(Box::new(Self {
            instance,
            _entry: entry,
        })))
    }

    /// The devices there are.
    pub(super) fn devices(&self) -> Result<Vec<vk::PhysicalDevice>, DeviceError> {
        // SAFETY: O2: the instance is alive.
        unsafe { self.instance.enumerate_physical_devices() }
            .map_err(|result| unavailable(format!("devices cannot be listed ({result})")))
    }

    pub(super) fn describe(&self, device: vk::PhysicalDevice) -> Candidate {
        // SAFETY: O2: `device` is one of the instance's.
        let basic = unsafe { self.instance.get_physical_device_properties(device) };
        let mut candidate = Candidate {
            name: basic.device_name_as_c_str().map_or_else(
                |_| "?".to_owned(),
                |name: &CStr| name.to_string_lossy().into_owned(),
            ),
            kind: basic.device_type,
            api_version: basic.api_version,
            sparse_binding: false,
            sparse_residency_buffer: false,
            sparse_residency_aliased: false,
            arrays_of_buffers: false,
            timeline_semaphore: false,
            families: Vec::new(),
            limits: Limits::default(),
            identity: DriverIdentity::default(),
            has_budget: false,
        };
        if basic.api_version >= vk::API_VERSION_1_2 {
            self.describe_features(device, &mut candidate);
            candidate.limits = self.limits(device, &basic);
            candidate.identity = self.identity(device, &basic);
            candidate.has_budget = self.has_budget(device);
        }
        candidate
    }

    fn describe_features(&self, device: vk::PhysicalDevice, candidate: &mut Candidate) {
        let mut newer = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut newer);
        // SAFETY: O2, and the device knows version 1.2.
        let families = unsafe {
            self.instance
                .get_physical_device_features2(device, &mut features);
            self.instance
                .get_physical_device_queue_family_properties(device)
        };
        let basic = features.features;
        candidate.sparse_binding = basic.sparse_binding == vk::TRUE;
        candidate.sparse_residency_buffer = basic.sparse_residency_buffer == vk::TRUE;
        candidate.sparse_residency_aliased = basic.sparse_residency_aliased == vk::TRUE;
        candidate.arrays_of_buffers = basic.shader_storage_buffer_array_dynamic_indexing
            == vk::TRUE
            && newer.descriptor_indexing == vk::TRUE
            && newer.shader_storage_buffer_array_non_uniform_indexing == vk::TRUE
            && newer.runtime_descriptor_array == vk::TRUE;
        candidate.timeline_semaphore = newer.timeline_semaphore == vk::TRUE;
        candidate.families = families.iter().map(|family| family.queue_flags).collect();
    }

    fn limits(&self, device: vk::PhysicalDevice, basic: &vk::PhysicalDeviceProperties) -> Limits {
        let mut third = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut fourth = vk::PhysicalDeviceMaintenance4Properties::default();
        let mut dot = vk::PhysicalDeviceShaderIntegerDotProductProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut third);
        let knows_third = basic.api_version >= vk::API_VERSION_1_3;
        if knows_third {
            properties = properties.push_next(&mut fourth).push_next(&mut dot);
        }
        // SAFETY: O2; the device knows the versions that these structures belong to.
        unsafe {
            self.instance
                .get_physical_device_properties2(device, &mut properties);
        }
        let buffer = if knows_third {
            fourth.max_buffer_size
        } else {
            u64::MAX
        };
        let limits = &basic.limits;
        Limits {
            address_space: limits.sparse_address_space_size,
            buffer,
            allocation: third.max_memory_allocation_size,
            window: limits.max_storage_buffer_range.into(),
            window_alignment: limits.min_storage_buffer_offset_alignment.max(4),
            strict_holes: basic.sparse_properties.residency_non_resident_strict == vk::TRUE,
            group_threads: limits
                .max_compute_work_group_invocations
                .min(limits.max_compute_work_group_size[0]),
            shared_bytes: limits.max_compute_shared_memory_size,
            tick_nanoseconds: match limits.timestamp_compute_and_graphics {
                vk::TRUE => limits.timestamp_period.into(),
                _ => 0.0,
            },
            integer_dot: knows_third && self.has_integer_dot(device),
            fast_integer_dot: dot.integer_dot_product4x8_bit_packed_signed_accelerated == vk::TRUE,
            storage_buffers: limits
                .max_per_stage_descriptor_storage_buffers
                .min(limits.max_descriptor_set_storage_buffers)
                .min(limits.max_per_stage_resources),
        }
    }

    /// Of a device that knows version 1.1.
    fn identity(
        &self,
        device: vk::PhysicalDevice,
        basic: &vk::PhysicalDeviceProperties,
    ) -> DriverIdentity {
        let mut ids = vk::PhysicalDeviceIDProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids);
        // SAFETY: O2; the device knows the version that the structure belongs to.
        unsafe {
            self.instance
                .get_physical_device_properties2(device, &mut properties);
        }
        DriverIdentity {
            vendor: basic.vendor_id,
            device: basic.device_id,
            driver_version: basic.driver_version,
            driver: ids.driver_uuid,
            kernels: basic.pipeline_cache_uuid,
        }
    }

    fn has_budget(&self, device: vk::PhysicalDevice) -> bool {
        // SAFETY: O2.
        let extensions = unsafe { self.instance.enumerate_device_extension_properties(device) };
        let is_it = |known: &vk::ExtensionProperties| {
            known.extension_name_as_c_str() == Ok(vk::EXT_MEMORY_BUDGET_NAME)
        };
        extensions.is_ok_and(|extensions| extensions.iter().any(is_it))
    }

    /// Of a device that knows version 1.3.
    fn has_integer_dot(&self, device: vk::PhysicalDevice) -> bool {
        let mut third = vk::PhysicalDeviceVulkan13Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut third);
        // SAFETY: O2, and the device knows the version that the structure belongs to.
        unsafe {
            self.instance
                .get_physical_device_features2(device, &mut features);
        }
        third.shader_integer_dot_product == vk::TRUE
    }
}

/// The best of `candidates`, or the one at `place`, how it is used, and how its pages are found, which is at most `wanted`; or
/// why none will do. A GPU comes before a software driver, however pages are found there.
pub(super) fn choose(
    candidates: &[Candidate],
    place: Option<usize>,
    wanted: PageTable,
) -> Result<(usize, Families, PageTable), DeviceError> {
    if candidates.is_empty() {
        return Err(unavailable("no Vulkan device".to_owned()));
    }
    if let Some(place) = place.filter(|place| *place >= candidates.len()) {
        let names = candidates.iter().enumerate();
        let names = names.map(|(place, candidate)| format!("{place} {}", candidate.name));
        let names: Vec<String> = names.collect();
        return Err(unavailable(format!(
            "no Vulkan device {place}; there are {}",
            names.join(", ")
        )));
    }
    let mut best: Option<(_, usize, Families, PageTable)> = None;
    let mut lacking = Vec::new();
    let asked = |index: &usize| place.is_none_or(|place| place == *index);
    for (index, candidate) in candidates
        .iter()
        .enumerate()
        .filter(|(index, _)| asked(index))
    {
        match suits(candidate, wanted) {
            Ok((families, pages)) => {
                let rank = (rank(candidate.kind), std::cmp::Reverse(pages));
                if best.is_none_or(|(least, ..)| rank < least) {
                    best = Some((rank, index, families, pages));
                }
            }
            Err(what) => lacking.push(format!("{} lacks {what}", candidate.name)),
        }
    }
    best.map(|(_, index, families, pages)| (index, families, pages))
        .ok_or_else(|| unavailable(lacking.join(", ")))
}

fn rank(kind: vk::PhysicalDeviceType) -> u8 {
    match kind {
        vk::PhysicalDeviceType::DISCRETE_GPU => 0,
        vk::PhysicalDeviceType::INTEGRATED_GPU => 1,
        vk::PhysicalDeviceType::VIRTUAL_GPU => 2,
        _ => 3,
    }
}

/// The families to use a device through and how its pages are found, or the first thing it lacks.
fn suits(candidate: &Candidate, wanted: PageTable) -> Result<(Families, PageTable), &'static str> {
    let needs = [
        (candidate.api_version >= vk::API_VERSION_1_2, "Vulkan 1.2"),
        (candidate.timeline_semaphore, "timelineSemaphore"),
    ];
    if let Some((_, what)) = needs.into_iter().find(|(has, _)| !has) {
        return Err(what);
    }
    let find = |flags| {
        let mut families = candidate.families.iter();
        let found = families.position(|family: &vk::QueueFlags| family.contains(flags));
        found.map(|index| index as u32)
    };
    let compute = find(vk::QueueFlags::COMPUTE).ok_or("a compute queue")?;
    let both = find(vk::QueueFlags::COMPUTE | vk::QueueFlags::SPARSE_BINDING);
    let bind = both.or(find(vk::QueueFlags::SPARSE_BINDING));
    // Without aliasing a page would be in one place at most: the table, which has no such limit, is the better one then.
    let sparse = candidate.sparse_binding
        && candidate.sparse_residency_buffer
        && candidate.sparse_residency_aliased;
    if let (true, PageTable::Device, Some(bind)) = (sparse, wanted, bind) {
        let compute = both.unwrap_or(compute);
        return Ok((Families { compute, bind }, PageTable::Device));
    }
    let looks_up = candidate.arrays_of_buffers && heap_slots(&candidate.limits) >= LEAST_HEAP_SLOTS;
    let pages = match looks_up {
        true => wanted.min(PageTable::Lookup),
        false => PageTable::Unused,
    };
    let families = Families {
        compute,
        bind: compute,
    };
    Ok((families, pages))
}

fn unavailable(reason: String) -> DeviceError {
    DeviceError::Unavailable {
        device: NAME,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, kind: vk::PhysicalDeviceType) -> Candidate {
        Candidate {
            name: name.to_owned(),
            kind,
            api_version: vk::API_VERSION_1_2,
            sparse_binding: true,
            sparse_residency_buffer: true,
            sparse_residency_aliased: true,
            arrays_of_buffers: true,
            timeline_semaphore: true,
            families: vec![vk::QueueFlags::COMPUTE | vk::QueueFlags::SPARSE_BINDING],
            limits: Limits {
                storage_buffers: 24,
                ..Limits::default()
            },
            identity: DriverIdentity::default(),
            has_budget: false,
        }
    }

    fn reason(candidates: &[Candidate]) -> String {
        match choose(candidates, None, PageTable::Device) {
            Err(DeviceError::Unavailable { device, reason }) => {
                assert_eq!(device, NAME);
                reason
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_missing_loader_is_unavailable() {
        let error = OpenInstance::load(Some("no-such-loader.so")).err().unwrap();
        let text = error.to_string();
        assert!(
            text.starts_with("vulkan is not available: no Vulkan loader"),
            "{text}"
        );
        assert!(text.ends_with("use the dense device instead"), "{text}");
    }

    #[test]
    fn a_gpu_comes_before_a_software_driver() {
        let software = candidate("software", vk::PhysicalDeviceType::CPU);
        let integrated = candidate("integrated", vk::PhysicalDeviceType::INTEGRATED_GPU);
        let mut discrete = candidate("discrete", vk::PhysicalDeviceType::DISCRETE_GPU);
        let chosen = |list: &[Candidate]| choose(list, None, PageTable::Device).unwrap().0;
        assert_eq!(
            chosen(&[software.clone(), integrated.clone(), discrete.clone()]),
            2
        );
        discrete.api_version = vk::API_VERSION_1_1;
        assert_eq!(chosen(&[software, integrated, discrete]), 1);
    }

    #[test]
    fn a_device_is_had_by_its_place_however_good_others_are() {
        let software = candidate("software", vk::PhysicalDeviceType::CPU);
        let mut old = candidate("old", vk::PhysicalDeviceType::DISCRETE_GPU);
        old.api_version = vk::API_VERSION_1_1;
        let discrete = candidate("discrete", vk::PhysicalDeviceType::DISCRETE_GPU);
        let list = [discrete, software, old];
        let at = |place| choose(&list, Some(place), PageTable::Device);
        assert_eq!([0, 1].map(|place| at(place).unwrap().0), [0, 1]);
        let told = at(2).unwrap_err().to_string();
        assert!(told.contains("old lacks Vulkan 1.2"), "{told}");
        let told = at(3).unwrap_err().to_string();
        assert!(told.contains("0 discrete, 1 software, 2 old"), "{told}");
    }

    #[test]
    fn pages_are_found_as_a_device_can() {
        let good = candidate("card", vk::PhysicalDeviceType::DISCRETE_GPU);
        let with = |change: fn(&mut Candidate), wanted| {
            let mut candidate = good.clone();
            change(&mut candidate);
            choose(&[candidate], None, wanted).unwrap().2
        };
        for wanted in [PageTable::Unused, PageTable::Lookup, PageTable::Device] {
            assert_eq!(with(|_| {}, wanted), wanted);
        }
        let lacks: [fn(&mut Candidate); 4] = [
            |c| c.sparse_binding = false,
            |c| c.sparse_residency_buffer = false,
            |c| c.sparse_residency_aliased = false,
            |c| c.families = vec![vk::QueueFlags::COMPUTE],
        ];
        for change in lacks {
            assert_eq!(with(change, PageTable::Device), PageTable::Lookup);
            assert_eq!(with(change, PageTable::Unused), PageTable::Unused);
        }
        // A table needs more than a few buffers, and threads that choose among them.
        let lacks: [fn(&mut Candidate); 2] = [
            |c| c.arrays_of_buffers = false,
            |c| c.limits.storage_buffers = 8,
        ];
        for change in lacks {
            assert_eq!(with(change, PageTable::Lookup), PageTable::Unused);
            assert_eq!(with(change, PageTable::Device), PageTable::Device);
        }
        // Of two GPUs alike, the one with pages.
        let mut dense = good.clone();
        (dense.sparse_binding, dense.arrays_of_buffers) = (false, false);
        let all = PageTable::Device;
        assert_eq!(choose(&[dense, good.clone()], None, all).unwrap().0, 1);
    }

    #[test]
    fn what_is_lacking_is_named() {
        let good = candidate("card", vk::PhysicalDeviceType::DISCRETE_GPU);
        assert_eq!(reason(&[]), "no Vulkan device");
        let lacks = |change: fn(&mut Candidate)| {
            let mut candidate = good.clone();
            change(&mut candidate);
            reason(&[candidate])
        };
        assert_eq!(
            lacks(|c| c.timeline_semaphore = false),
            "card lacks timelineSemaphore"
        );
        assert_eq!(
            lacks(|c| c.api_version = vk::API_VERSION_1_1),
            "card lacks Vulkan 1.2"
        );
        assert_eq!(
            lacks(|c| c.families = vec![vk::QueueFlags::SPARSE_BINDING]),
            "card lacks a compute queue"
        );
    }

    #[test]
    fn separate_queues_are_used_where_no_family_does_both() {
        let mut split = candidate("card", vk::PhysicalDeviceType::DISCRETE_GPU);
        split.families = vec![
            vk::QueueFlags::GRAPHICS,
            vk::QueueFlags::SPARSE_BINDING,
            vk::QueueFlags::COMPUTE,
        ];
        let families = Families {
            compute: 2,
            bind: 1,
        };
        let chosen = choose(&[split], None, PageTable::Device);
        assert_eq!(chosen.unwrap(), (0, families, PageTable::Device));
    }
}
