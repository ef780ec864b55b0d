// The browsable API sends raw data, PUT, PATCH and DELETE by script: they get the page's key in a
// header. Forms that the browser sends by itself have it in a hidden field.
(function ($, page) {
  $.ajaxPrefilter(function (options, original, request) {
    var safe = /^(GET|HEAD|OPTIONS|TRACE)$/i.test(options.type);
    if (!safe && !options.crossDomain) {
      request.setRequestHeader(page.header, '"' + page.key + '"');
    }
  });
})(window.jQuery, document.currentScript.dataset);
