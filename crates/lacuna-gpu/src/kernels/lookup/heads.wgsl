// New words of keys and of values go to the pages that the table lists.

@group(0) @binding(2) var<storage, read> key_pages: array<u32>;
@group(0) @binding(3) var<storage, read> value_pages: array<u32>;

fn keep_key(at: u32, word: u32) {
    let entry = key_pages[at >> PAGE_BITS];
    heaps[heap_of(entry)].units[unit_of_heap(entry, at)] = word;
}

fn keep_value(at: u32, word: u32) {
    let entry = value_pages[at >> PAGE_BITS];
    heaps[heap_of(entry)].units[unit_of_heap(entry, at)] = word;
}
