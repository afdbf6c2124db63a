//! Memory that the program has freed, and the system does not have back yet.
//!
//! The C library keeps what is freed, for each thread that ever asked for memory: a gigabyte stayed
//! after a storm of large requests, which no account of ours had any more. This is about the GNU C
//! library; musl's and Android's give back what is freed in whole pages by themselves.
//!
//! # Safety
//!
//! This module opens `unsafe` for two calls into the C library. Both may be made at any time, from any
//! thread, and take no pointers.

#![cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator's settings are the C library's")
)]

/// Sets the allocator up to give large blocks back the moment they are freed. For a program to call
/// once, before it starts threads; a library leaves this to the program it is in.
pub fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Blocks from this size on are mappings of their own. The library's own threshold rises to
        /// 32 MiB with the blocks that are freed, and smaller ones then stay.
        const MAPPED_BYTES: libc::c_int = 256 << 10;
        // SAFETY: takes two numbers; an unknown setting is refused.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES) };
    }
}

/// Gives back every whole page of freed memory, in a few milliseconds. For when much has been freed.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number, of bytes to keep.
    unsafe {
        libc::malloc_trim(0)
    };
}
