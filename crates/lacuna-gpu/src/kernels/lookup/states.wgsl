// Elements of a state, by their numbers from where what is shown of the table begins.

@group(0) @binding(2) var<storage, read> pages: array<u32>;

fn state_at(at: u32) -> f32 {
    let entry = pages[at >> PAGE_BITS];
    return bitcast<f32>(heaps[heap_of(entry)].units[unit_of_heap(entry, at)]);
}

fn keep_state(at: u32, element: f32) {
    let entry = pages[at >> PAGE_BITS];
    heaps[heap_of(entry)].units[unit_of_heap(entry, at)] = bitcast<u32>(element);
}
