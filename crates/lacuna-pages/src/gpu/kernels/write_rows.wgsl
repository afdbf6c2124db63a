// Copies rows of words from a dense source into memory with a stride between them.
// One thread per word. Nothing outside the rows is written, whatever lies there.

struct Rows {
    first: u32,  // where the first row begins in `destination`, in words
    row: u32,    // words of a row
    stride: u32, // words from one row to the next in `destination`
    words: u32,  // words of all rows together
}

var<immediate> rows: Rows;

@group(0) @binding(0) var<storage, read_write> destination: array<u32>;
@group(0) @binding(1) var<storage, read_write> source: array<u32>;

@compute @workgroup_size(128)
fn write_rows(@builtin(global_invocation_id) thread: vec3<u32>) {
    let word = thread.x;
    if word >= rows.words {
        return;
    }
    let row = word / rows.row;
    destination[rows.first + row * rows.stride + word % rows.row] = source[word];
}
