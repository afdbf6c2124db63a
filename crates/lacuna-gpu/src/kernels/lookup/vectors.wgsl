// Vectors of keys and of values, by their numbers from where what is shown of the table begins.

alias Unit = vec4<u32>;
const PAGE_BITS = 12u;

@group(0) @binding(1) var<storage, read> key_pages: array<u32>;
@group(0) @binding(2) var<storage, read> value_pages: array<u32>;

fn key_vector(at: u32) -> vec4<u32> {
    let entry = key_pages[at >> PAGE_BITS];
    return heaps[heap_of(entry)].units[unit_of_heap(entry, at)];
}

fn value_vector(at: u32) -> vec4<u32> {
    let entry = value_pages[at >> PAGE_BITS];
    return heaps[heap_of(entry)].units[unit_of_heap(entry, at)];
}
