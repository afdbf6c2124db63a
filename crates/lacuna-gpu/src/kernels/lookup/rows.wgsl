// New words of rows go to the pages that the table lists.

@group(0) @binding(1) var<storage, read> pages: array<u32>;

fn keep(at: u32, word: u32) {
    let entry = pages[at >> PAGE_BITS];
    heaps[heap_of(entry)].units[unit_of_heap(entry, at)] = word;
}
