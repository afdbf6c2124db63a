// The bindings as an Android app has them, on a desktop's Java: compiled and run by `.ci/test-bindings`.
package lacuna.tests

import java.nio.file.Files
import kotlinx.coroutines.async
import kotlinx.coroutines.awaitAll
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.delay
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeout
import lacuna.Chat
import lacuna.Engine
import lacuna.EngineSettings
import lacuna.LacunaException
import lacuna.LoadProgress
import lacuna.Piece
import lacuna.Role
import lacuna.TextSettings
import lacuna.needs

fun expect(said: Boolean, what: () -> String) {
    if (!said) throw AssertionError(what())
}

inline fun <reified E : Throwable> refused(what: () -> Unit): E {
    try {
        what()
    } catch (error: Throwable) {
        return error as? E ?: throw error
    }
    throw AssertionError("nothing was refused")
}

val settings = EngineSettings(budgetBytes = 64uL shl 20, contextTokens = 512uL, threads = 1u)
val greedy = TextSettings(maxTokens = 24uL, temperature = 0f)

suspend fun Engine.whole(prompt: String) = complete(prompt, greedy).use { it.text() }

suspend fun replies(engine: Engine) {
    val question = listOf(Chat(Role.USER, "What is ownership?"))
    var text = ""
    var end: Piece.End? = null
    engine.chat(question, greedy).use { stream ->
        while (true) {
            when (val piece = stream.next() ?: break) {
                is Piece.Content -> text += piece.text
                is Piece.End -> end = piece
                else -> throw AssertionError("$piece")
            }
        }
    }
    expect(text.isNotEmpty() && end?.usage?.generatedTokens == 24uL) { "$text $end" }
    expect(engine.chat(question, greedy).use { it.text() } == text) { "another text" }
}

suspend fun together(engine: Engine) = runBlocking {
    val prompts = List(6) { "Ownership $it" }
    val alone = prompts.map { engine.whole(it) }
    val together = prompts.map { async { engine.whole(it) } }.awaitAll()
    expect(alone == together) { "$alone $together" }
}

/** A coroutine that is cancelled leaves nothing behind, and the stream can be read on. */
suspend fun cancelled(engine: Engine) = runBlocking {
    val stream = engine.complete("Ownership is", TextSettings(maxTokens = 400uL))
    val reading = launch { while (stream.next() != null) {} }
    delay(20)
    reading.cancelAndJoin()
    stream.cancel()
    expect(stream.next() == null) { "it went on" }
    stream.close()
}

suspend fun sessions(engine: Engine) {
    val path = Files.createTempDirectory("lacuna").resolve("session").toString()
    suspend fun lacuna.Session.written(): String {
        begin(greedy)
        return buildString { while (true) append(next() ?: break) }
    }
    val session = engine.session()
    session.append("Ownership is")
    expect(session.written() == engine.whole("Ownership is")) { "a session says something else" }
    val fork = session.fork()
    session.save(path)
    val loaded = engine.loadSession(path)
    for (it in listOf(session, fork, loaded)) it.append(" So")
    val said = listOf(session, fork, loaded).map { it.written() }
    expect(said.distinct().size == 1) { "$said" }
}

suspend fun all() = withTimeout(120_000) {
    var told = 0
    val progress = object : LoadProgress {
        override fun progressed(doneBytes: ULong, totalBytes: ULong?) {
            told += 1
        }
    }
    val needed = needs("demo", settings)
    expect(needed.leastBytes <= needed.workingBytes) { "$needed" }
    val engine = Engine.open("demo", settings, progress)
    expect((told > 0) == (engine.memory().weightBytes > 0uL)) { "told $told times" }
    replies(engine)
    together(engine)
    cancelled(engine)
    sessions(engine)
    val error = refused<LacunaException.BudgetExceeded> { engine.setBudget(1_000_000uL) }
    expect("MiB" in error.reason) { error.reason }
    refused<LacunaException.Model> { Engine.open("no/such/model.gguf") }
    engine.shutDown()
    refused<LacunaException.Closed> { engine.whole("Ownership is") }
    engine.close()
}

fun main() {
    runBlocking { all() }
    println("Kotlin: all passed")
}
