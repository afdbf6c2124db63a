//! A device whose reads fail, come short, or come late, as it is told: for tests of what stands on a reader.

use std::collections::VecDeque;
use std::io;
use std::thread;
use std::time::Duration;

use super::device::{Done, Read, ReadDevice};

/// Longer than anything that is read in a test takes.
const STALL: Duration = Duration::from_millis(20);

/// What happens to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails as a broken disk does.
    Fail,
    /// It is interrupted: the same call works the next time.
    Interrupt,
    /// It brings half of the pages there is room for, or of one page a byte.
    Shorten,
    /// It finds the end of the file.
    End,
    /// It is done after all others that are under way.
    Delay,
    /// It begins after the one that comes next.
    Reorder,
    /// The device takes it only after a while.
    Stall,
}

/// A device of which every n-th read suffers a fault.
#[derive(Debug)]
pub struct FaultyDevice {
    inner: Box<dyn ReadDevice>,
    every: u64,
    fault: Fault,
    count: u64,
    /// Reads that are done without the device inside.
    done: VecDeque<Done>,
    /// Numbers of reads that come after all others.
    late: Vec<u64>,
    held: VecDeque<Done>,
    /// Numbers of reads that bring a byte at most.
    capped: Vec<u64>,
    /// Where reads that brought so little began. The next one there is let through, unless all are to suffer: with others in
    /// between, every n-th could be the same one again and again.
    spared: Vec<u64>,
    /// What is left of buffers of shortened reads.
    rest: Vec<(u64, super::Buffer)>,
    /// A read that waits for the next.
    back: Option<Read>,
}

impl FaultyDevice {
    /// `inner`, with `fault` for its n-th read, the 2n-th and so on.
    #[must_use]
    pub fn new(inner: Box<dyn ReadDevice>, every: u64, fault: Fault) -> Self {
        Self {
            inner,
            every: every.max(1),
            fault,
            count: 0,
            done: VecDeque::new(),
            late: Vec::new(),
            held: VecDeque::new(),
            capped: Vec::new(),
            spared: Vec::new(),
            rest: Vec::new(),
            back: None,
        }
    }

    fn fails(&mut self, read: Read, error: io::Error) {
        self.done.push_back(Done {
            read,
            result: Err(error),
        });
    }

    fn shorten(&mut self, mut read: Read) {
        let half = read.buffer.len() / 2 / super::ALIGNMENT * super::ALIGNMENT;
        match half {
            0 if self.every > 1 && self.spared.contains(&read.offset) => {
                self.spared.retain(|offset| *offset != read.offset);
            }
            0 => {
                self.spared.push(read.offset);
                self.capped.push(read.number);
            }
            _ => self.rest.push((read.number, read.buffer.split_off(half))),
        }
        self.inner.begin(read);
    }

    /// What the device inside says, with what this one keeps put back.
    fn passed(&mut self, mut done: Done) -> Option<Done> {
        let of = |(number, _): &(u64, super::Buffer)| *number == done.read.number;
        if let Some(index) = self.rest.iter().position(of) {
            let (_, rest) = self.rest.swap_remove(index);
            done.read.buffer.join(rest);
        }
        if self.capped.contains(&done.read.number) {
            self.capped.retain(|number| *number != done.read.number);
            done.result = done.result.map(|bytes| bytes.min(1));
        }
        if self.late.contains(&done.read.number) {
            self.late.retain(|number| *number != done.read.number);
            self.held.push_back(done);
            return None;
        }
        Some(done)
    }
}

impl ReadDevice for FaultyDevice {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn takes(&self, calls: usize, bytes: usize) -> bool {
        self.inner.takes(calls, bytes)
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn begin(&mut self, read: Read) {
        self.count += 1;
        let is_faulty = self.count.is_multiple_of(self.every);
        let waited = self.back.take();
        match (is_faulty, self.fault) {
            (true, Fault::Fail) => self.fails(read, io::Error::other("the disk is broken")),
            (true, Fault::Interrupt) => self.fails(read, io::ErrorKind::Interrupted.into()),
            (true, Fault::End) => self.done.push_back(Done {
                read,
                result: Ok(0),
            }),
            (true, Fault::Shorten) => self.shorten(read),
            (true, Fault::Delay) => {
                self.late.push(read.number);
                self.inner.begin(read);
            }
            (true, Fault::Reorder) => self.back = Some(read),
            (true, Fault::Stall) => {
                thread::sleep(STALL);
                self.inner.begin(read);
            }
            (false, _) => self.inner.begin(read),
        }
        if let Some(read) = waited {
            self.inner.begin(read);
        }
    }

    fn finish(&mut self, wait: bool) -> io::Result<Option<Done>> {
        if let Some(done) = self.done.pop_front() {
            return Ok(Some(done));
        }
        loop {
            match self.inner.finish(wait)? {
                Some(done) => {
                    if let Some(done) = self.passed(done) {
                        return Ok(Some(done));
                    }
                }
                None if !wait => return Ok(None),
                // Nothing else is under way.
                None => match self.back.take() {
                    Some(read) => self.inner.begin(read),
                    None => return Ok(self.held.pop_front()),
                },
            }
        }
    }
}
