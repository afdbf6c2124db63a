//! Chunks of WebP files, looked at before the decoder is: it makes room for all that a chunk says it has, whether or
//! not the file goes on for so long. One pass over the chunks' headers; nothing is copied.

/// Bytes of `RIFF`, the length of what follows, and `WEBP`.
const FILE_HEADER_BYTES: usize = 12;
/// Bytes of a frame's place and size, before its own chunks.
const FRAME_HEADER_BYTES: usize = 16;

/// Kinds of chunks that the decoder knows.
const KNOWN: [&[u8; 4]; 9] = [
    b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF", b"ICCP", b"EXIF", b"XMP ",
];

/// Looks at the chunks of a file, and at those of its frames. The error says what is wrong with one.
pub(crate) fn check(file: &[u8]) -> Result<(), String> {
    for chunk in Chunks(file.get(FILE_HEADER_BYTES..).unwrap_or_default()) {
        let chunk = chunk?;
        if &chunk.kind == b"ANMF" {
            let inner = chunk.contents.get(FRAME_HEADER_BYTES..);
            for chunk in Chunks(inner.unwrap_or_default()) {
                chunk?;
            }
        }
    }
    Ok(())
}

/// One that lies in the file as a whole.
struct Chunk<'a> {
    kind: [u8; 4],
    contents: &'a [u8],
}

/// Chunks one after another.
struct Chunks<'a>(&'a [u8]);

impl<'a> Iterator for Chunks<'a> {
    type Item = Result<Chunk<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, rest) = self.0.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let Some(contents) = rest.get(..length) else {
            self.0 = &[];
            // Some programs put bytes of their own after an image; the decoder makes no room for those.
            return KNOWN.contains(&kind).then(|| {
                let kind = kind.escape_ascii();
                let left = rest.len();
                Err(format!(
                    "chunk `{kind}` claims {length} bytes, and {left} are left"
                ))
            });
        };
        // Chunks start at even places.
        self.0 = rest.get(length + length % 2..).unwrap_or_default();
        let kind = *kind;
        Some(Ok(Chunk { kind, contents }))
    }
}
