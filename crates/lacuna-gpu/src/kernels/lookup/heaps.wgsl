enable wgpu_binding_array;

// Pages of 64 KiB, wherever they are: what kernels are shown of a reservation is entries of the table that lists them, one for
// each page. An entry has the number of a heap in its upper half, and of a page of it in its lower half. What comes with this
// file says what a `Unit` is, of which a page has 2 to the power of PAGE_BITS. Sixteen bytes that belong together are of one
// page, since these begin at multiples of more.

struct Heap {
    units: array<Unit>,
}

@group(1) @binding(0) var<storage, read_write> heaps: binding_array<Heap>;

fn heap_of(entry: u32) -> u32 {
    return entry >> 16u;
}

// The unit of that heap that the unit `at` of what is shown is.
fn unit_of_heap(entry: u32, at: u32) -> u32 {
    return ((entry & 0xffffu) << PAGE_BITS) | (at & ((1u << PAGE_BITS) - 1u));
}
