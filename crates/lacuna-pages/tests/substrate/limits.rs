//! Exhausted limits of the system, and memory that goes back to it, each in a process of its own.

use lacuna_pages::{
    ByteLength, DeviceError, Error, HostConfig, HostDevice, PageCount, PageSize, Pool, PoolConfig,
};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::children::succeeds_in_child;
use crate::support::{PAGE, filled, host, pages, range, small};

fn limit(resource: Resource, value: u64) {
    setrlimit(
        resource,
        Rlimit {
            current: Some(value),
            maximum: Some(value),
        },
    )
    .unwrap();
}

#[test]
fn running_out_of_address_space_is_an_error_value() {
    succeeds_in_child(
        "limits::running_out_of_address_space_is_an_error_value",
        || {
            let pool = host(small());
            let mut buffer = filled(&pool, 4, 0);
            limit(Resource::As, 2 << 30);
            let error = pool.reserve(ByteLength::gibibytes(4), "").unwrap_err();
            assert!(
                matches!(error, Error::Device(DeviceError::OutOfAddressSpace { .. })),
                "{error}"
            );
            assert!(error.to_string().contains("ulimit -v"));
            buffer.truncate(pages(1)).unwrap();
            buffer.ensure_mapped(0..4 * PAGE).unwrap();
            pool.verify([&buffer]).unwrap();
        },
    );
}

#[test]
fn running_out_of_descriptors_is_an_error_value() {
    succeeds_in_child(
        "limits::running_out_of_descriptors_is_an_error_value",
        || {
            let pool = host(small());
            let mut buffer = pool.reserve(pages(10_000), "").unwrap();
            limit(Resource::Nofile, 20);
            let mut mapped = 0;
            let error = loop {
                match buffer.ensure_mapped(0..(mapped + 1) * PAGE) {
                    Ok(_) => mapped += 1,
                    Err(error) => break error,
                }
            };
            assert!(
                matches!(error, Error::Device(DeviceError::OutOfDescriptors { .. })),
                "{error}"
            );
            assert_eq!(mapped % 16, 0, "every page of every heap is used first");
            pool.verify([&buffer]).unwrap();
            let before = pool.ledger();
            assert!(buffer.ensure_mapped(0..(mapped + 5) * PAGE).is_err());
            assert_eq!(pool.ledger(), before);
            buffer.unmap(range(0, 3)).unwrap();
            buffer
                .ensure_mapped(mapped * PAGE..(mapped + 3) * PAGE)
                .unwrap();
        },
    );
}

#[test]
fn the_kernels_own_mapping_limit_is_an_error_value_and_changes_nothing() {
    let test = "limits::the_kernels_own_mapping_limit_is_an_error_value_and_changes_nothing";
    succeeds_in_child(test, || {
        let config = HostConfig {
            mapping_share_percent: 95,
            ..HostConfig::DEFAULT
        };
        let page_size = PageSize::KIB_4;
        let pool_config = PoolConfig {
            page_size,
            ..PoolConfig::default()
        };
        // Two devices know nothing of each other, so together they reach the kernel's limit.
        let pool = || Pool::new(HostDevice::with_config(config).unwrap(), pool_config).unwrap();
        let (first, second) = (pool(), pool());
        let length = page_size.bytes_of(PageCount::new(200_000));
        let mut buffers = [&first, &second].map(|pool| pool.reserve(length, "").unwrap());
        let mut errors = Vec::new();
        for buffer in &mut buffers {
            let every_other = (0..100_000).map(|page| 2 * page * 4096);
            for start in every_other {
                if let Err(error) = buffer.ensure_mapped(start..start + 1) {
                    errors.push(error);
                    break;
                }
            }
        }
        assert!(
            matches!(errors[0], Error::OutOfMappings { .. }),
            "{errors:?}"
        );
        let refused = matches!(
            errors[1],
            Error::Device(DeviceError::OutOfAddressSpace { .. })
        );
        assert!(refused, "{errors:?}");
        let [full, mut other] = buffers;
        first.verify([&full]).unwrap();
        second.verify([&other]).unwrap();
        drop(full);
        other.ensure_mapped(150_000 * 4096..150_010 * 4096).unwrap();
        other.truncate(ByteLength::ZERO).unwrap();
        second.verify([&other]).unwrap();
    });
}

/// Anonymous memory of this process.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn anonymous() -> u64 {
    let memory = lacuna_pages::ProcessMemory::read();
    memory.expect("Linux says").anonymous.get()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn what_was_freed_in_small_blocks_goes_back_when_that_is_asked_for() {
    succeeds_in_child(
        "limits::what_was_freed_in_small_blocks_goes_back_when_that_is_asked_for",
        || {
            let mut blocks: Vec<Vec<u8>> = (0..1024).map(|_| vec![1; 64 << 10]).collect();
            // The last one stays, so that the C library has no reason to shrink its heap.
            drop(blocks.drain(..1023));
            let before = anonymous();
            lacuna_pages::return_freed_memory();
            let given_back = before.saturating_sub(anonymous());
            assert!(given_back > 32 << 20, "{given_back} bytes of 64 MiB");
        },
    );
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn large_blocks_go_back_when_they_are_freed_however_large_the_last_was() {
    succeeds_in_child(
        "limits::large_blocks_go_back_when_they_are_freed_however_large_the_last_was",
        || {
            lacuna_pages::return_large_blocks();
            // From here on the C library would keep blocks of up to this size.
            drop(vec![1_u8; 30 << 20]);
            let blocks: Vec<Vec<u8>> = (0..8).map(|_| vec![1; 4 << 20]).collect();
            let behind = vec![1_u8; 4 << 10];
            let before = anonymous();
            drop(blocks);
            let given_back = before.saturating_sub(anonymous());
            assert!(given_back > 24 << 20, "{given_back} bytes of 32 MiB");
            drop(behind);
        },
    );
}
