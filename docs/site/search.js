/* Queries as people type them: a whole word counts as a word and not as the beginning of others ("in" found
   "inference"), words that say nothing about the subject are left out, and names of code are also searched by their
   parts (`GRPOTrainer`, `max_prompt_length`). The last word stays a beginning while you type. A query with quotation
   marks is not changed. */
(() => {
  const separator = /[\s\-,:;!?=\[\]()"'’`*~^+|/？]+|\.(?!\d)/
  const idle = new Set(("a an the and or not no of in on at to for from by as with into is are am was were be been do does did can " +
    "could should would will how what when where which who why there this that it its i me my we you your if any some " +
    "use used using get have having has way ways want need make add adding support supports supported please help " +
    "question questions issue issues problem problems request feature bug example examples best proper only").split(" "))
  const same = {
    multiturn: "multi turn", multinode: "multi node", multigpu: "multi gpu", dataset: "data set", datasets: "data set",
    ckpt: "checkpoint", func: "function", hf: "hugging face", eval: "evaluate", logprob: "log prob", logprobs: "log prob",
    oom: "oom memory", vlm: "vision language", async: "async asynchronous",
  }
  const parts = word => word.replace(/([a-z\d])([A-Z])/g, "$1_$2").replace(/([A-Z]+)([A-Z][a-z])/g, "$1_$2").split("_")
  const rewrite = query => {
    if (query.includes('"')) return query
    const words = query.split(separator).filter(Boolean)
    const wanted = words.filter(word => !idle.has(word.toLowerCase()))
    const exact = new Set()
    for (const word of wanted.length ? wanted : words)
      for (const part of [word, ...parts(word)])
        for (const one of [part, ...(same[part.toLowerCase()] || "").split(" ")])
          if (one && !idle.has(one.toLowerCase()) || !wanted.length) exact.add(one.toLowerCase() + "^1")
    const last = words[words.length - 1] || ""
    if (last.length > 2 && query.endsWith(last)) exact.add(last.toLowerCase())
    return [...exact].filter(one => one !== "^1").join(" ")
  }
  const post = Worker.prototype.postMessage
  Worker.prototype.postMessage = function (message, ...more) {
    const query = message && message.type === 2 && typeof message.data === "string"
    return post.call(this, query ? { ...message, data: rewrite(message.data) } : message, ...more)
  }
})()
